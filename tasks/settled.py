"""What the last comparison of the same model, machine and setting settled, for ``precision.mode: measured``.

A comparison rests in ``runs/<name>/comparison.json``. One without a verdict (too few steps or seeds) is never used.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field, ValidationError

from tasks.comparison import machine_differences, variant_params
from tasks.comparison_measures import ComparisonRecord
from tasks.errors import RefusedInput
from tasks.files import read_record, write_record
from tasks.params import Params, differences, with_overrides
from tasks.places import RUNS_DIR
from tasks.precision import plan_precision
from tasks.records import Hardware, Record
from tasks.run_folder import COMPARISON_FILE

SETTLED_FILE = "settled.json"
# what another number of steps, another seed or another question may differ in; the mode is what is looked for
FREE_SECTIONS = ("memory", "evaluation", "comparison")
FREE_FIELDS = frozenset(
    {
        *(f"precision.{name}" for name in ("mode", "objective", "allow_emulated", "on_divergence")),
        *(f"training.{name}" for name in ("seed", "max_steps", "save_steps")),
    }
)


class Settled(Record):
    """What a run takes over from a comparison; kept in the run's folder, so that a later comparison changes nothing on a resume."""

    overrides: dict[str, Any] = Field(default_factory=dict, description="dotted paths under precision; empty: nothing was asked of one")
    because: str = Field(default="", description="the beginning of the baseline's reason")

    def applied(self, params: Params) -> Params:
        """Return the params with what was taken over."""
        return with_overrides(params, self.overrides, "precision.mode 'measured'") if self.overrides else params


class _Candidate(NamedTuple):
    record: ComparisonRecord
    variant: str | None  # None: these runs show no difference, and 'auto' takes none that is out
    differences: tuple[str, ...]


@task(cache_policy=NO_CACHE)
def take_over(run_dir: Path, hardware: Hardware, params: Params) -> Settled:
    """Return what a run takes over: what it took over in an earlier start, or what the last comparison says now."""
    path = run_dir / SETTLED_FILE
    if path.is_file():
        return read_record(path, Settled)
    settled = settle(hardware, params)
    write_record(path, settled)
    return settled


def settle(hardware: Hardware, params: Params) -> Settled:
    """Return the precision of the last comparison's best variant, if `precision.mode` asks for it.

    Raises:
        RefusedInput: no comparison with a verdict is of the same model, machine and setting; names the nearest and what it differs in.
    """
    if params.precision.mode != "measured":
        return Settled()
    candidates = [_candidate(record, hardware, params) for record in _verdicts()]
    fitting = next((candidate for candidate in candidates if not candidate.differences), None)
    if fitting is None:
        raise RefusedInput(_refusal(candidates))
    record, variant, _ = fitting
    verdict = record.measured.verdict
    because = f"precision.mode is 'measured': in comparison {record.run_name} {verdict.sentences[0].rstrip('.')}"
    if not verdict.left:
        raise RefusedInput(f"{because}; so none of its variants can be taken over: name a precision, or set precision.mode to 'auto'")
    if variant not in (verdict.best_overall, verdict.only_finished):
        because += f"; 'auto' would take one that is out, so {variant} is taken"
    if variant is None:
        return Settled(overrides={"precision.mode": "auto"}, because=f"{because}, so that 'auto' decides")
    overrides = {path: value for path, value in record.params["comparison"]["variants"][variant].items() if path.startswith("precision.")}
    return Settled(overrides={**overrides, "precision.mode": _params(record, variant).precision.mode}, because=because)


def _refusal(candidates: list[_Candidate]) -> str:
    nearest = min(candidates, key=lambda candidate: len(candidate.differences), default=None)
    found = f"; the nearest, {nearest.record.run_name}, differs in {', '.join(nearest.differences[:5])}" if nearest else ""
    asked = "precision.mode is 'measured', but no comparison with a verdict is of this model, machine and setting"
    return f"{asked}{found}; make one: python -m flows.compare --params FILE training.max_steps=105, or set precision.mode to 'auto'"


def _verdicts() -> Iterator[ComparisonRecord]:
    """Give the comparisons with a verdict, the newest first; one of another version's form is left out."""
    for path in sorted(RUNS_DIR.glob(f"*/{COMPARISON_FILE}"), reverse=True):
        with contextlib.suppress(ValidationError, OSError):
            record = read_record(path, ComparisonRecord)
            if record.measured.verdict.settles_something:
                yield record


def _candidate(record: ComparisonRecord, hardware: Hardware, params: Params) -> _Candidate:
    verdict = record.measured.verdict
    variant = verdict.best_overall or verdict.only_finished or _instead_of_auto(record, hardware, params)
    theirs = _params(record, variant)
    taken = record.params["comparison"]["variants"].get(variant, {})
    differences = [*machine_differences(record.hardware, hardware), *_setting_differences(theirs, params, taken)]
    return _Candidate(record, variant, tuple(differences))


def _instead_of_auto(record: ComparisonRecord, hardware: Hardware, params: Params) -> str | None:
    """Return the first variant left if 'auto' would take the precision of one that is out; None leaves it to 'auto'."""
    auto = plan_precision(hardware, with_overrides(params, {"precision.mode": "auto"}, "precision.mode 'measured'")).attempts[0]
    left = record.measured.verdict.left
    modes = {name: _params(record, name).precision.mode for name in record.params["comparison"]["variants"]}
    out = {mode for name, mode in modes.items() if name not in left} - {modes[name] for name in left}
    return left[0] if left and auto.precision.label in out else None


def _params(record: ComparisonRecord, variant: str | None) -> Params:
    common = Params.model_validate(record.params)
    return variant_params(common, variant, common.comparison.seeds[0]) if variant else common


def _setting_differences(theirs: Params, ours: Params, taken: Mapping[str, Any]) -> Iterator[str]:
    for path, (there, here) in differences(theirs, ours).items():
        free = path in FREE_FIELDS or path.split(".")[0] in FREE_SECTIONS or (path in taken and path.startswith("precision."))
        if not free:
            yield f"{path} ({there}, asked {here})"
