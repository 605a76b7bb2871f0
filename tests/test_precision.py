"""The plan: recorded machines, contradictions, retries, and properties that hold for every machine and every wish."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.logging import disable_run_logger

from tasks.errors import RefusedInput
from tasks.params import Params, parse_params
from tasks.precision import answer_shortage, decide_precision, plan_precision
from tasks.records import Attempt, Failure, FinishedAttempt, FormatSupport, Hardware, Outcome, PrecisionPlan, Support
from tests.machines import NAMES, UNUSABLE, hardware_of

LABELS = ("bf16", "fp16", "fp32")
THIS_KIND = "cpu_epyc_9r14"


def params_with(retries: object = None, training: dict[str, object] | None = None, **precision: object) -> Params:
    memory = {} if retries is None else {"retries": retries}
    return parse_params({"precision": precision, "memory": memory, "training": training or {}}, "test")


def planned(plan: PrecisionPlan) -> list[str]:
    return [attempt.precision.label for attempt in plan.attempts]


def support_of(hardware: Hardware, label: str) -> FormatSupport:
    return {"bf16": hardware.bf16, "fp16": hardware.fp16, "fp32": FormatSupport(level=Support.native, fact="fp32 runs")}[label]


def finished(attempt: Attempt, phase: str | None, state: str | None = None) -> FinishedAttempt:
    failure = Failure(phase=phase, error_type="OutOfMemoryError", message="no memory")
    outcome = Outcome(status="out_of_memory", failure=failure, last_state_dir=Path(state) if state else None)
    return FinishedAttempt(attempt=attempt, outcome=outcome, attempt_dir=Path("runs/1"))


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("tesla_t4", ["fp16", "fp16"]),
        ("tesla_v100", ["fp16", "fp16"]),
        ("tesla_p100", ["fp16", "fp16"]),
        ("a800_half_full", ["bf16", "fp16"]),
        ("h100_mig_2g", ["bf16", "fp16"]),
        ("mi300x", ["bf16", "fp16"]),
        ("apple_m2", ["fp16", "fp16"]),
        ("arc_b580", ["bf16", "fp16"]),
        ("cpu_xeon_8488c", ["bf16", "fp16"]),
        ("cpu_epyc_9r14", ["bf16", "bf16"]),
        ("rocm_build_no_gpu", ["bf16", "bf16"]),
        ("cpu_xeon_6252n_container", ["fp32", "fp32"]),
    ],
)
def test_auto_on_recorded_machines(name: str, labels: list[str]) -> None:
    assert planned(plan_precision(hardware_of(name), params_with())) == labels


def test_no_bf16_attempt_on_cards_that_emulate_it_and_the_plan_says_why() -> None:
    for name in ("tesla_t4", "tesla_v100", "tesla_p100"):
        plan = plan_precision(hardware_of(name), params_with())
        assert plan.attempts[0].precision.grad_scaler
        assert "emulates bf16" in plan.reason and "grad scaler" in plan.reason
        (ruled_out,) = [item for item in plan.ruled_out if item.precision == "bf16"]
        assert "< 8.0" in ruled_out.reason and "never runs on an accelerator" in ruled_out.reason
    assert "no tensor cores" in plan.reason


def test_bf16_by_name_on_a_v100_is_refused_with_the_remedy() -> None:
    found = r"precision\.mode is 'bf16' but Tesla V100-SXM2-32GB only emulates bf16 \(compute capability 7\.0 < 8\.0"
    message = found + ".*set precision.mode to 'auto', 'fp16' or 'fp32'$"
    for allow_emulated in (False, True):
        with pytest.raises(RefusedInput, match=message):
            plan_precision(hardware_of("tesla_v100"), params_with(mode="bf16", allow_emulated=allow_emulated))


def test_on_a_cpu_emulated_fp16_retry_is_a_rehearsal_when_allowed() -> None:
    plan = plan_precision(hardware_of(THIS_KIND), params_with(allow_emulated=True))
    assert planned(plan) == ["bf16", "fp16"]
    assert [attempt.rehearsal for attempt in plan.attempts] == [False, True]
    assert "rehearsal" in plan.attempts[1].reason and "fp16 (a rehearsal)" in plan.reason
    assert [item.precision for item in plan.ruled_out] == ["fp32"]


def test_on_a_cpu_an_emulated_retry_that_is_not_allowed_is_ruled_out_and_its_levers_stay() -> None:
    plan = plan_precision(hardware_of(THIS_KIND), params_with())
    retry = plan.attempts[1]
    assert retry.levers.gradient_checkpointing and not retry.rehearsal
    assert "only emulates fp16" in retry.reason and "so fp16 is ruled out and the retry runs in bf16" in retry.reason
    (ruled_out,) = [item for item in plan.ruled_out if item.precision == "fp16"]
    assert "precision.allow_emulated" in ruled_out.reason and "memory.retries[0] asked for it" in ruled_out.reason


def test_on_a_cpu_an_emulated_precision_asked_by_name_is_a_rehearsal() -> None:
    for mode in ("bf16", "fp16"):
        plan = plan_precision(hardware_of("cpu_xeon_6252n_container"), params_with(mode=mode, retries=[]))
        assert planned(plan) == [mode]
        assert plan.attempts[0].rehearsal and "rehearsal" in plan.reason


def test_a_retry_in_the_rehearsed_precision_that_was_asked_by_name_is_not_ruled_out() -> None:
    plan = plan_precision(hardware_of(THIS_KIND), params_with(mode="fp16"))
    assert planned(plan) == ["fp16", "fp16"]
    assert plan.attempts[1].rehearsal and "ruled out" not in plan.attempts[1].reason


def test_auto_on_a_cpu_without_native_bf16_starts_in_fp32_even_if_emulation_is_allowed() -> None:
    plan = plan_precision(hardware_of("cpu_xeon_6252n_container"), params_with(allow_emulated=True))
    assert planned(plan) == ["fp32", "fp16"]
    assert "starts in fp32" in plan.reason and plan.attempts[1].rehearsal


def test_the_retry_says_that_the_dtype_frees_nothing_and_which_levers_do() -> None:
    reason = plan_precision(hardware_of("a800_half_full"), params_with()).attempts[1].reason
    assert "from bf16 to fp16 frees no memory by itself" in reason
    for lever in ("micro-batch 8 -> 4", "gradient accumulation 4 -> 8", "gradient checkpointing off -> on", "effective batch stays 32"):
        assert lever in reason
    again = plan_precision(hardware_of("tesla_t4"), params_with()).attempts[1].reason
    assert "stays fp16, which frees nothing" in again


def test_every_retry_derives_from_the_original_levers() -> None:
    retries = [{"micro_batch_divisor": 2}, {"micro_batch_divisor": 4, "gradient_checkpointing": False}]
    plan = plan_precision(hardware_of("mi300x"), params_with(retries=retries))
    levers = [(item.levers.per_device_train_batch_size, item.levers.gradient_accumulation_steps) for item in plan.attempts]
    assert levers == [(8, 4), (4, 8), (2, 16)]
    assert [item.levers.gradient_checkpointing for item in plan.attempts] == [False, True, False]
    assert [item.name for item in plan.attempts] == ["1-baseline-bf16", "2-retry-fp16", "3-retry-fp16"]


@pytest.mark.parametrize(
    ("name", "precision", "retries", "message"),
    [
        ("mi300x", {"mode": "bf16", "grad_scaler": True}, None, "grad_scaler is true, but the baseline"),
        ("mi300x", {"mode": "auto", "grad_scaler": True}, None, "precision.mode to 'fp16', or set precision.grad_scaler to 'auto'"),
        ("mi300x", {"mode": "fp16", "grad_scaler": False}, None, "runs in fp16, which needs one"),
        ("mi300x", {"mode": "bf16", "grad_scaler": False}, None, r"memory.retries\[0\] runs in fp16, which needs one"),
        ("tesla_t4", {"mode": "bf16", "grad_scaler": False}, None, "grad_scaler to 'auto' and precision.mode to"),
        ("tesla_t4", {"mode": "fp16", "grad_scaler": True}, [{"precision": "fp32"}], r"memory.retries\[0\] runs in fp32, which has no use"),
    ],
)
def test_a_contradiction_about_the_grad_scaler_is_refused(name: str, precision: dict[str, object], retries: object, message: str) -> None:
    with pytest.raises(RefusedInput, match=message):
        plan_precision(hardware_of(name), params_with(retries=retries, **precision))


def test_a_shortage_elsewhere_leaves_the_rollout_alone() -> None:
    params = params_with()
    first, second = plan_precision(hardware_of("mi300x"), params).attempts
    assert answer_shortage(first, (), params) is first
    answered = answer_shortage(second, (finished(first, "backward"),), params)
    assert answered == second
    assert answer_shortage(second, (finished(first, None),), params) == second


def test_a_shortage_in_the_rollout_shrinks_its_chunk_and_the_attempt_goes_on_from_the_last_state() -> None:
    params = params_with()
    first, second = plan_precision(hardware_of("mi300x"), params).attempts
    answered = answer_shortage(second, (finished(first, "rollout", "runs/1/states/step-20"),), params)
    assert answered.levers.rollout_batch_size == 16
    assert answered.levers.effective_batch_size == 32
    assert answered.resume_from == Path("runs/1/states/step-20")
    assert answered.reason.startswith(second.reason)
    assert "rollout chunk 32 -> 16" in answered.reason and "step-20" in answered.reason


def test_several_shortages_keep_what_was_learnt_and_derive_from_the_plan() -> None:
    params = params_with(retries=[{}, {"rollout_divisor": 4}, {"rollout_divisor": 1}], training={"rollout_batch_size": 24})
    first, second, third, fourth = plan_precision(hardware_of("mi300x"), params).attempts
    done = (finished(first, "rollout", "a/step-10"),)
    second = answer_shortage(second, done, params)
    assert second.levers.rollout_batch_size == 12
    done = (*done, finished(second, "backward"))
    third = answer_shortage(third, done, params)
    assert (third.levers.rollout_batch_size, third.resume_from) == (6, Path("a/step-10"))
    done = (*done, finished(third, "rollout", "a/step-30"))
    fourth = answer_shortage(fourth, done, params)
    assert (fourth.levers.rollout_batch_size, fourth.resume_from) == (6, Path("a/step-30"))
    assert "no smaller than what failed" in fourth.reason


def test_the_same_divisor_after_a_second_shortage_in_the_rollout_still_shrinks() -> None:
    params = params_with(retries=[{}, {}], training={"rollout_batch_size": 2})
    first, second, third = plan_precision(hardware_of("mi300x"), params).attempts
    second = answer_shortage(second, (finished(first, "rollout"),), params)
    third = answer_shortage(third, (finished(first, "rollout"), finished(second, "rollout")), params)
    assert (second.levers.rollout_batch_size, third.levers.rollout_batch_size) == (1, 1)


def test_the_task_logs_and_returns_the_same_plan() -> None:
    with disable_run_logger():
        plan = decide_precision.fn(hardware_of("tesla_t4"), params_with())
    assert plan == plan_precision(hardware_of("tesla_t4"), params_with())


supports = st.builds(
    lambda level, number: FormatSupport(level=level, fact=f"fact number {number}"), st.sampled_from(list(Support)), st.integers(0, 9)
)
machines = st.one_of(
    st.sampled_from([name for name in NAMES if name not in UNUSABLE]).map(hardware_of),
    st.builds(
        lambda kind, bf16, fp16: hardware_of("tesla_t4").model_copy(update={"device_type": kind, "bf16": bf16, "fp16": fp16}),
        st.sampled_from(["cuda", "rocm", "xpu", "mps", "npu", "cpu"]),
        supports,
        supports,
    ),
)
retry_params = st.fixed_dictionaries(
    {"precision": st.sampled_from(LABELS), "micro_batch_divisor": st.sampled_from([1, 2, 4, 8]), "gradient_checkpointing": st.booleans()}
)
wishes = st.builds(
    lambda retries, checkpointing, precision: params_with(retries, {"gradient_checkpointing": checkpointing}, **precision),
    st.lists(retry_params, max_size=3),
    st.booleans(),
    st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["auto", *LABELS]),
            "grad_scaler": st.sampled_from(["auto", True, False]),
            "allow_emulated": st.booleans(),
        }
    ),
)


@settings(deadline=None)
@given(machines, wishes)
def test_every_plan_holds_and_every_refusal_names_what_is_then_accepted(hardware: Hardware, params: Params) -> None:
    try:
        plan = plan_precision(hardware, params)
    except RefusedInput as refusal:
        assert params.precision.mode != "auto" or params.precision.grad_scaler != "auto"
        remedies = remedies_in(str(refusal))
        assert remedies, refusal
        for remedy in remedies:
            changed = params.model_copy(update={"precision": params.precision.model_copy(update=remedy)})
            check_plan(plan_precision(hardware, changed), hardware, changed)
    else:
        check_plan(plan, hardware, params)


def remedies_in(message: str) -> list[dict[str, str]]:
    """Read every alternative that a refusal names, as changes to the precision section."""
    remedies: list[dict[str, str]] = []
    for way in re.split(r"(?:; |, or )set ", message)[1:]:
        scaler = {"grad_scaler": "auto"} if "precision.grad_scaler to 'auto'" in way else {}
        modes = re.findall(r"'(\w+)'", way.partition("precision.mode to ")[2])
        remedies += [{**scaler, "mode": mode} for mode in modes] or [scaler]
    return remedies


def check_plan(plan: PrecisionPlan, hardware: Hardware, params: Params) -> None:
    assert [attempt.number for attempt in plan.attempts] == list(range(1, len(params.memory.retries) + 2))
    assert [attempt.label for attempt in plan.attempts] == ["baseline"] + ["retry"] * len(params.memory.retries)
    for attempt in plan.attempts:
        label = attempt.precision.label
        support = support_of(hardware, label)
        assert support.level is Support.native or (support.level is Support.emulated and hardware.device_type == "cpu")
        assert attempt.rehearsal == (support.level is Support.emulated)
        assert attempt.precision.grad_scaler == (label == "fp16")
        assert params.precision.grad_scaler in ("auto", attempt.precision.grad_scaler)
        assert attempt.levers.effective_batch_size == params.training.effective_batch_size
        assert attempt.engine == params.training.engine
        assert any(support_of(hardware, name).fact in attempt.reason for name in LABELS)
    labels = set(planned(plan))
    assert {item.precision for item in plan.ruled_out} == set(LABELS) - labels
    for item in plan.ruled_out:
        assert support_of(hardware, item.precision).fact in item.reason
    if params.precision.mode != "auto":
        assert plan.attempts[0].precision.label == params.precision.mode
    elif params.precision.allow_emulated is False:
        assert not any(attempt.rehearsal for attempt in plan.attempts)
