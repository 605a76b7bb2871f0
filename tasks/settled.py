"""What the last comparison of the same model, machine and setting settled, for ``precision.mode: measured``.

A comparison rests in ``runs/<name>/comparison.json``. One without a verdict (too few steps or seeds) is never used.
"""

import contextlib
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field, ValidationError

from tasks.comparison import machine_differences, variant_params
from tasks.comparison_measures import ComparisonRecord
from tasks.errors import RefusedInput
from tasks.files import read_record, write_record
from tasks.next_attempt import SHORT
from tasks.params import Params, differences, with_overrides
from tasks.places import RUNS_DIR
from tasks.precision import plan_precision
from tasks.records import Hardware, Record
from tasks.run_folder import COMPARISON_FILE

SETTLED_FILE = "settled.json"
# what another number of steps, another seed or another question may differ in; the mode is what is looked for. A budget under which
# a variant ran short is no such thing: under another the verdict could be another
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
    passed_over = list(takewhile(lambda candidate: candidate.differences, candidates))
    if len(passed_over) == len(candidates):
        raise RefusedInput(_refusal(candidates))
    record, variant, _ = candidates[len(passed_over)]
    verdict = record.measured.verdict
    because = f"precision.mode is 'measured': in comparison {record.run_name} {verdict.sentences[0].rstrip('.')}"
    if passed_over:
        told = f"{passed_over[0].record.run_name}, differs in {', '.join(passed_over[0].differences[:5])}"
        because += f"; newer comparisons that do not fit: {len(passed_over)}, the last, {told}"
    if not verdict.left:
        raise RefusedInput(f"{because}; so none of its variants can be taken over: name a precision, or set precision.mode to 'auto'")
    if variant not in (verdict.best_overall, verdict.only_finished):
        because += f"; 'auto' would take one that is out, so {variant} is taken"
    if variant is None:
        return Settled(overrides={"precision.mode": "auto"}, because=f"{because}, so that 'auto' decides")
    overrides = {path: value for path, value in record.params["comparison"]["variants"][variant].items() if path.startswith("precision.")}
    if besides := [f"{path} {value}" for path, value in overrides.items() if path != "precision.mode"]:
        because += f"; taken over with it: {', '.join(besides)}"
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
    differences = [*machine_differences(record.hardware, hardware), *_setting_differences(record, variant, params)]
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


def _setting_differences(record: ComparisonRecord, variant: str | None, ours: Params) -> Iterator[str]:
    # what the variant sets is taken over in place of what all variants had in common, but of nothing else that was asked for
    asked = differences(_params(record, None), ours)
    taken = {path for path in record.params["comparison"]["variants"].get(variant, {}) if path.startswith("precision.")} - set(asked)
    for path, (there, here) in differences(_params(record, variant), ours).items():
        if not (path in FREE_FIELDS | taken or path.split(".")[0] in FREE_SECTIONS):
            yield f"{path} ({there}, asked {here})"
    for short in dict.fromkeys(run.variant for run in record.measured.runs if run.status in SHORT):
        there, here = (its.memory.budget_mb for its in (_params(record, short), ours))
        if there != here:
            yield f"memory.budget_mb ({there}, under which {short} ran short of memory, asked {here})"
