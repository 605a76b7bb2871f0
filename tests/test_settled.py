"""What `precision.mode: measured` takes over from a comparison, and what it refuses."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks import settled
from tasks.command_line import main
from tasks.comparison import plan_comparison, variant_params
from tasks.comparison_measures import ComparisonRecord, Measured
from tasks.errors import RefusedInput
from tasks.files import write_record
from tasks.params import Params, with_overrides
from tasks.precision import plan_precision
from tasks.records import ArtifactVersion, DatasetVersion
from tasks.settled import settle, take_over
from tasks.verdict import judge
from tests.comparisons import TRACKED, Plant, comparison, run_folder
from tests.machines import hardware_of

MACHINE = hardware_of("h100_x8")
SLOW, FAST = Plant(step_time=1.3), Plant()
VARIANTS = {"wide": {"precision.mode": "bf16"}, "exact": {"precision.mode": "fp16", "precision.init_scale": 512.0}}
Keep = Callable[..., ComparisonRecord]


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Keep the record of a comparison of `wide` and `exact` as the compare flow does."""
    monkeypatch.setattr(settled, "RUNS_DIR", tmp_path)

    def keep_one(
        name: str,
        plants: Mapping[str, Plant],
        variants: Mapping[str, Mapping[str, Any]] = VARIANTS,
        num_seeds: int = 3,
        diverged: str = "",
        short: str = "",
        **overrides: Any,
    ) -> ComparisonRecord:
        asked = {"comparison.variants": variants, **{path.replace("__", "."): value for path, value in overrides.items()}}
        params = with_overrides(Params(), asked, "test")
        runs = tuple(comparison(np.random.default_rng(0), plants, num_seeds))
        nothing = {"measures": None, "correct": (), "base_correct": ()}
        ends = {diverged: {"status": "diverged", **nothing}, short: {"status": "out_of_memory", **nothing}}
        runs = tuple(run.model_copy(update=ends.get(run.variant, {})) for run in runs)
        version = ArtifactVersion(path=tmp_path, dvc_hash="0.dir", size_bytes=1, location="store:x")
        record = ComparisonRecord(
            run=run_folder(name, tmp_path),
            tracked=TRACKED,
            hardware=MACHINE,
            plan=plan_comparison(MACHINE, params),
            params=params.model_dump(mode="json"),
            dataset=DatasetVersion(version=version, num_train=1, num_eval=1, num_dropped=0),
            base_model=version,
            attempts=(),
            measured=Measured(runs=runs, verdict=judge(runs)),
            wall_seconds=None,
            training_seconds=1,
            versions={},
        )
        (tmp_path / name).mkdir()
        write_record(tmp_path / name / "comparison.json", record)
        return record

    return keep_one


def asked(**fields: Any) -> Params:
    return with_overrides(
        Params(), {"precision.mode": "measured", **{path.replace("__", "."): value for path, value in fields.items()}}, ""
    )


def test_the_best_variants_precision_is_taken_over_whole_and_its_reason_is_told(keep: Keep) -> None:
    record = keep("20261201-a", {"wide": SLOW, "exact": FAST})
    assert record.measured.verdict.best_overall == "exact"
    # steps, seed, budget and answers to a shortage may be others
    params = asked(training__max_steps=7, training__seed=3, memory__budget_mb=9000, precision__on_divergence="next")
    found = settle(MACHINE, params)
    assert found.overrides == {"precision.mode": "fp16", "precision.init_scale": 512.0}
    applied = found.applied(params)
    assert (applied.precision.init_scale, applied.precision.on_divergence, applied.training.max_steps) == (512, "next", 7)
    plan = plan_precision(MACHINE, applied, found.because)
    assert plan.attempts[0].precision.label == "fp16" and plan.attempts[0].precision.grad_scaler
    assert plan.reason.startswith(
        "precision.mode is 'measured': in comparison 20261201-a exact is best overall: wide shown worse in speed; taken over "
    )


def test_the_only_variant_that_finished_is_taken_over_though_nothing_was_tested(keep: Keep) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST}, diverged="exact")
    found = settle(MACHINE, asked())
    assert found.overrides == {"precision.mode": "bf16"}
    told = "wide is the only one that neither ran out of memory nor diverged: exact diverged in 3 of 3 runs (counted, not tested)"
    assert told in found.because


def test_a_budget_under_which_a_variant_ran_short_must_be_the_one_asked(keep: Keep) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST}, short="wide", memory__budget_mb=500.0)
    assert settle(MACHINE, asked(memory__budget_mb=500)).overrides["precision.mode"] == "fp16"
    for other in (None, 600.0):
        with pytest.raises(RefusedInput) as refused:
            settle(MACHINE, asked(memory__budget_mb=other))
        assert f"differs in memory.budget_mb (500.0, under which wide ran short of memory, asked {other})" in str(refused.value)
    # a variant's own budget counts, and one under which another ran well does not
    keep("20261202-b", {"wide": SLOW, "exact": FAST}, {**VARIANTS, "wide": {**VARIANTS["wide"], "memory.budget_mb": 9.0}}, short="wide")
    assert settle(MACHINE, asked(memory__budget_mb=9)).overrides["precision.mode"] == "fp16"
    with pytest.raises(RefusedInput, match=r"the nearest, 20261202-b, differs in memory\.budget_mb"):
        settle(MACHINE, asked())


def test_a_newer_comparison_that_does_not_fit_is_named_in_the_reason(keep: Keep) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST})
    assert "newer" not in settle(MACHINE, asked()).because
    keep("20261202-b", {"wide": FAST, "exact": SLOW}, training__learning_rate=1e-3)
    told = "; newer comparisons that do not fit: 1, the last, 20261202-b, differs in training.learning_rate (0.001, asked 2e-05)"
    found = settle(MACHINE, asked())
    assert "in comparison 20261201-a exact is best overall" in found.because and told in found.because
    keep("20261203-c", {"wide": FAST, "exact": SLOW}, dataset__family="gcd")
    told = "; newer comparisons that do not fit: 2, the last, 20261203-c, differs in dataset.family (gcd, asked chain_sum)"
    assert told in settle(MACHINE, asked()).because


def test_what_is_asked_beside_the_mode_is_not_replaced(keep: Keep) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST})
    assert "; taken over with it: precision.init_scale 512.0" in settle(MACHINE, asked()).because
    assert settle(MACHINE, asked(precision__init_scale=512)).overrides["precision.init_scale"] == 512
    with pytest.raises(RefusedInput, match=r"differs in precision.init_scale \(512.0, asked 1024.0\)"):
        settle(MACHINE, asked(precision__init_scale=1024))


def test_what_a_comparison_saw_fail_is_not_taken_by_way_of_auto(keep: Keep) -> None:
    three = {**VARIANTS, "full": {"precision.mode": "fp32"}}
    assert plan_precision(MACHINE, Params()).attempts[0].precision.label == "bf16"
    keep("20261201-a", {"wide": FAST, "exact": FAST, "full": FAST}, three, diverged="wide")
    found = settle(MACHINE, asked())
    assert found.overrides["precision.mode"] == "fp16"
    assert "wide diverged in 3 of 3 runs; 'auto' would take one that is out, so exact is taken" in found.because
    keep("20261202-ruined", {"wide": Plant(logit=-9.0), "exact": Plant(logit=-9.0)})
    with pytest.raises(RefusedInput, match="shown worse than the base model; so none of its variants can be taken over"):
        settle(MACHINE, asked())


def test_a_comparison_that_tested_nothing_hides_no_verdict(keep: Keep) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST})
    keep("20261202-b", {"wide": FAST}, {"wide": VARIANTS["wide"]})
    assert settle(MACHINE, asked()).overrides["precision.mode"] == "fp16"


def test_the_newest_fitting_verdict_counts_and_none_at_all_leaves_it_to_auto(keep: Keep) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST})
    keep("20261202-b", {"wide": FAST, "exact": FAST})
    keep("20261203-other-work", {"wide": SLOW, "exact": FAST}, training__learning_rate=1e-3)
    keep("20261204-indicative", {"wide": SLOW, "exact": FAST}, num_seeds=1)
    found = settle(MACHINE, asked())
    assert found.overrides == {"precision.mode": "auto"}
    reason = plan_precision(MACHINE, found.applied(asked()), found.because).attempts[0].reason
    assert "in comparison 20261202-b No variant is best overall" in reason and "so that 'auto' decides: " in reason
    assert reason.split("decides: ")[1] == plan_precision(MACHINE, Params()).attempts[0].reason


@pytest.mark.parametrize(
    ("machine", "fields", "difference"),
    [
        ("a800_half_full", {}, "device_name ("),
        ("h100_x8", {"training__learning_rate": 1e-3}, "training.learning_rate (2e-05, asked 0.001)"),
        ("h100_x8", {"precision__lm_head_fp32": True}, "precision.lm_head_fp32 (False, asked True)"),
        ("h100_x8", {"dataset__family": "gcd"}, "dataset.family (chain_sum, asked gcd)"),
    ],
)
def test_another_machine_model_or_setting_is_refused_with_what_differs(
    machine: str, fields: dict[str, Any], difference: str, keep: Keep
) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST})
    with pytest.raises(RefusedInput) as refused:
        settle(hardware_of(machine), asked(**fields))
    assert difference in str(refused.value) and "the nearest, 20261201-a, differs in" in str(refused.value)
    assert "python -m flows.compare" in str(refused.value)


def test_without_any_verdict_and_below_a_variant_of_other_work_it_is_refused(keep: Keep) -> None:
    with pytest.raises(RefusedInput, match="no comparison with a verdict is of this model, machine and setting; make one"):
        settle(MACHINE, asked())
    lora = {"wide": VARIANTS["wide"], "exact": {"precision.mode": "fp16", "training.lora_rank": 8}}
    keep("20261201-a", {"wide": SLOW, "exact": FAST}, lora)
    with pytest.raises(RefusedInput, match=r"differs in training.lora_rank \(8, asked None\)"):
        settle(MACHINE, asked())
    assert settle(MACHINE, asked(training__lora_rank=8)).overrides == {"precision.mode": "fp16"}


def test_a_resumed_run_keeps_what_it_took_over(keep: Keep, tmp_path: Path) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST})
    run_dir = tmp_path / "20261202-run"
    run_dir.mkdir()
    first = take_over.fn(run_dir, MACHINE, asked())
    keep("20261203-b", {"wide": FAST, "exact": SLOW})
    assert settle(MACHINE, asked()).overrides == {"precision.mode": "bf16"}
    assert take_over.fn(run_dir, MACHINE, asked()) == first


def test_nothing_is_taken_over_unless_asked_and_a_variant_cannot_ask(keep: Keep) -> None:
    keep("20261201-a", {"wide": SLOW, "exact": FAST})
    assert settle(MACHINE, Params()).applied(Params()) == Params()
    circular = with_overrides(Params(), {"comparison.variants": {"x": {"precision.mode": "measured"}}}, "")
    with pytest.raises(RefusedInput, match="rests on a comparison"):
        variant_params(circular, "x", 1)


def test_the_plan_refuses_before_any_work_without_a_comparison(keep: Keep, capsys: pytest.CaptureFixture[str]) -> None:
    def never(**_: Any) -> ComparisonRecord:
        raise AssertionError

    assert main(never, ["--plan", "--params", "params/smoke.yaml", "precision.mode=measured"]) == 2
    assert "no comparison with a verdict is of this model, machine and setting" in capsys.readouterr().err
