"""The plan of a comparison: what is refused before any work starts, the order of the runs, and what is left to run."""

from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from tasks import comparison, prediction
from tasks.comparison import (
    decide_order,
    last_starts,
    library_versions,
    next_run,
    plan_comparison,
    predict_variants,
    predicted_comparison,
    resolve_comparison,
    run_order,
    variant_params,
)
from tasks.errors import ProgramFailed, RefusedInput
from tasks.files import write_record
from tasks.memory import MB
from tasks.params import ComparisonParams, Params
from tasks.peak_memory import PredictionRequest
from tasks.prediction import predict_peak
from tasks.records import Attempt, FinishedAttempt, MemoryPrediction, Outcome, PrecisionPlan, Status
from tasks.verdict import MIN_STEPS
from tests.machines import hardware_of
from tests.test_prediction import setting_of

FILE = "params/compare.yaml"


def params_with(**variants: dict[str, Any]) -> Params:
    return Params.model_validate({"comparison": {"variants": variants, "seeds": [1, 2]}})


def ended(attempt: Attempt, status: Status, *, earlier: bool = False) -> FinishedAttempt:
    return FinishedAttempt(attempt=attempt, outcome=Outcome(status=status), attempt_dir=Path(attempt.name), in_earlier_start=earlier)


def test_each_round_begins_with_the_next_variant_and_holds_all_of_them() -> None:
    asked = ComparisonParams(variants={"a": {}, "b": {}, "c": {}}, seeds=(7, 8, 9, 10))
    rounds = {7: "abc", 8: "bca", 9: "cab", 10: "abc"}
    assert run_order(asked) == [(name, seed) for seed, names in rounds.items() for name in names]


def test_all_runs_of_a_comparison_do_the_same_work() -> None:
    resolved = resolve_comparison(FILE)
    runs = [variant_params(resolved, name, 2) for name in resolved.comparison.variants]
    assert [run.precision.mode for run in runs] == ["bf16", "fp16", "fp32"]
    assert runs[0].training == runs[1].training == runs[2].training and runs[0].training.seed == 2
    assert all(run.memory.retries == () and run.precision.on_divergence == "stop" for run in runs)


def test_variants_and_rounds_are_picked_by_name_and_number() -> None:
    resolved = resolve_comparison(FILE, variants=["fp32", "bf16"], seeds=2)
    assert (list(resolved.comparison.variants), resolved.comparison.seeds) == (["fp32", "bf16"], (1, 2))


def test_a_variant_of_ones_own_is_any_setting() -> None:
    own = ["comparison.variants.head={precision.mode: bf16, precision.lm_head_fp32: true}", "comparison.variants.lora.training.lora_rank=8"]
    resolved = resolve_comparison(FILE, variants=["head", "lora"], overrides=own)
    assert variant_params(resolved, "head", 1).precision.lm_head_fp32
    assert variant_params(resolved, "lora", 1).training.lora_rank == 8


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"variants": ["bf16", "fp16", "bf16"]}, "--variants bf16,fp16,bf16: name each variant once; for more runs of each: --seeds N"),
        ({"seeds": 0}, "--seeds 0: take 1 or more, the number of rounds"),
        ({"variants": ["bf61"]}, "'bf61' is none of comparison.variants"),
        ({"overrides": ["training.max_steps=5"]}, "warmup_steps 5 leaves none of training.max_steps 5"),
        ({"overrides": ["comparison.variants.x={training.max_steps: 9}"]}, "training.max_steps 105 -> 9 changes the work"),
        (
            {"overrides": ["comparison.variants.x={training.per_device_train_batch_size: 8}"]},
            "training.per_device_train_batch_size x gradient_accumulation_steps x num_processes 32 -> 8 changes",
        ),
        ({"overrides": ["comparison.variants.x={training.strategy: ddp, training.num_processes: 2}"]}, "x num_processes 32 -> 64"),
        ({"overrides": ["comparison.variants.x={training.seed: 1}"]}, "training.seed 2 -> 1"),
        ({"overrides": ["comparison.variants.x={training.temperature: 0.5}"]}, "training.temperature 1.0 -> 0.5 changes the work"),
        ({"overrides": ["comparison.variants.x={training.engine_args.top_k: 5}"]}, "training.engine_args.top_k None -> 5 changes"),
        ({"overrides": ["comparison.variants.x={precision: {}}"]}, "x.precision: all variants do the same work"),
        ({"overrides": ["comparison.variants.x={dataset.seed: 4}"]}, "x.dataset.seed: all variants do the same work"),
        ({"overrides": ["comparison.variants.x={precision.mod: fp16}"]}, "precision.mod: unknown key; did you mean precision.mode?"),
        ({"overrides": ["comparison.variants.../x={precision.mode: fp16}"]}, "comparison.variants"),
        ({"overrides": ["comparison.variants={'../x': {precision.mode: fp16}}"]}, "'../x' is a folder's too"),
        # MLflow's keys hold no +
        ({"overrides": ["comparison.variants={a+b: {precision.mode: fp16}}"]}, "'a+b' is a folder's too"),
        ({"overrides": ["comparison.seeds=[1, 1]"]}, "holds one twice"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedInput) as refused:
        resolve_comparison(FILE, **asked)
    assert message in str(refused.value)


def test_what_the_hardware_refuses_is_ruled_out_and_the_rest_is_run() -> None:
    plan = plan_comparison(hardware_of("tesla_k80"), params_with(bf16={"precision.mode": "bf16"}, fp32={"precision.mode": "fp32"}))
    assert [(run.name, run.number) for run in plan.attempts] == [("fp32-seed1", 2), ("fp32-seed2", 3)]
    (refused,) = plan.ruled_out
    assert refused.precision == "bf16" and "bf16" in refused.reason


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Precisions that each process was asked to predict; one that comes to fp16 fails there. A peak has as many bytes as LoRA ranks."""
    requests: list[tuple[str, ...]] = []

    def program(module: str, request: PredictionRequest, work_dir: Path, say: object) -> None:
        requests.append(tuple(peak.precision.label for peak in request.peaks.values()))
        for name, peak in request.peaks.items():
            if peak.precision.label == "fp16":
                raise ProgramFailed("no dry run in fp16")
            made = MemoryPrediction(
                peak_bytes=peak.levers.lora_rank or 1, least_bytes=0, most_bytes=9, phase="load", categories={}, phases={}
            )
            write_record(request.out_dir / name, made)

    monkeypatch.setattr(prediction, "PREDICTIONS_DIR", tmp_path / "predictions")
    monkeypatch.setattr(prediction, "ask_program", program)
    return requests


def peaks_of(plan: PrecisionPlan) -> list[tuple[int, int | None] | None]:
    return [run.prediction and (run.prediction.peak_bytes, run.prediction.available_bytes) for run in plan.attempts]


def test_one_process_predicts_every_variant_with_its_own_settings(asked: list[tuple[str, ...]]) -> None:
    own = {"precision.mode": "fp32", "training.lora_rank": 8, "memory.budget_mb": 20}
    params = params_with(a={"precision.mode": "bf16"}, b=own, c={"precision.mode": "fp32", "memory.preflight": "off"})
    machine, said = hardware_of("h100_x8"), list[str]()
    plan = predicted_comparison(plan_comparison(machine, params), machine, params, said.append)
    assert asked == [("bf16", "fp32")]
    whole, own_share = (1, machine.memory_free_bytes), (8, 20 * MB)
    assert peaks_of(plan) == [whole, own_share, None, own_share, None, whole]
    # that the dataset is not built
    assert len(said) == 1
    off = params_with(a={"precision.mode": "bf16", "memory.preflight": "off"})
    plan = plan_comparison(machine, off)
    assert predicted_comparison(plan, machine, off, said.append) == plan
    assert len(said) == len(asked) == 1, "where nothing is predicted, nothing is said of what a prediction needs"


def test_a_variant_that_cannot_be_predicted_costs_no_others_prediction(asked: list[tuple[str, ...]], tmp_path: Path) -> None:
    params = params_with(a={"precision.mode": "bf16"}, b={"precision.mode": "fp16"}, c={"precision.mode": "fp32"})
    machine, said = hardware_of("h100_x8"), list[str]()
    plan = plan_comparison(machine, params)
    found = predicted_comparison(plan, machine, params, said.append)
    assert [bool(peak) for peak in peaks_of(found)] == [True, False, True, False, True, True]
    assert [line for line in said if "no peak" in line] == ["b: no peak is predicted: no dry run in fp16"]
    # as the flow does: all together, then each run for itself
    asked.clear()
    setting = setting_of(tmp_path, machine, plan)
    with disable_run_logger():
        predict_variants.fn(setting, params)
        assert asked == [("bf16", "fp16", "fp32")]
        runs = [predict_peak.fn(run, setting, variant_params(params, run.variant, run.seed)) for run in plan.attempts[:3]]
    assert [bool(run.prediction) for run in runs] == [True, False, True]


def test_a_machine_that_refuses_all_is_one_message() -> None:
    with pytest.raises(RefusedInput, match="no variant can run here"):
        plan_comparison(hardware_of("tesla_k80"), params_with(bf16={"precision.mode": "bf16"}))


def test_a_run_that_failed_is_not_made_again_and_one_that_was_cut_off_is() -> None:
    plan = plan_comparison(hardware_of("h100_x8"), params_with(a={"precision.mode": "bf16"}, b={"precision.mode": "fp16"}))
    first, second, third, _ = plan.attempts
    assert next_run(plan, ()) == first
    done = (ended(first, "out_of_memory", earlier=True), ended(second, "cancelled", earlier=True))
    again = next_run(plan, done)
    assert again is not None and (again.name, again.resume_from) == ("b-seed1-resumed-1", None)
    # ended from outside in this start, it is begun again, three times in all
    twice = (*done, ended(again, "cancelled"))
    once_more = next_run(plan, twice)
    assert once_more is not None and once_more.name == "b-seed1-resumed-2"
    assert next_run(plan, (*twice, ended(once_more, "cancelled"))) == third
    whole = (*done, ended(again, "succeeded"))
    assert [it.outcome.status for it in last_starts(whole)] == ["out_of_memory", "succeeded"]


def test_a_comparison_is_gone_on_with_on_its_own_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, params = hardware_of("h100_x8"), params_with(a={"precision.mode": "bf16"})
    with disable_run_logger():
        plan = decide_order.fn(tmp_path, machine, params)
        less_free = machine.model_copy(update={"memory_free_bytes": 2**30})
        assert decide_order.fn(tmp_path, less_free, params) == plan
        with pytest.raises(RefusedInput, match=r"begun on another machine or version, torch_version \(.*, here 9.0\); go on with it there"):
            decide_order.fn(tmp_path, machine.model_copy(update={"torch_version": "9.0"}), params)
        theirs = {**library_versions(), "trl": "9.9"}
        monkeypatch.setattr(comparison, "library_versions", lambda: theirs)
        with pytest.raises(RefusedInput, match=r"begun on another machine or version, trl \(.*, here 9.9\)"):
            decide_order.fn(tmp_path, machine, params)


@pytest.mark.parametrize(
    ("file", "machine", "num_runs"),
    [("compare", "cpu_epyc_9r14", 9), ("compare-smollm2", "cpu_epyc_9r14", 9), ("compare-article", "a100_80gb_pcie", 6)],
)
def test_the_comparisons_that_come_with_the_project_are_long_enough_for_a_verdict(file: str, machine: str, num_runs: int) -> None:
    resolved = resolve_comparison(f"params/{file}.yaml")
    plan = plan_comparison(hardware_of(machine), resolved)
    assert (len(plan.attempts), plan.ruled_out) == (num_runs, ())
    assert resolved.training.max_steps - resolved.comparison.warmup_steps >= MIN_STEPS
