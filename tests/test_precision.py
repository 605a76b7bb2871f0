"""The plan: recorded machines, contradictions, retries, and properties that hold for every machine and every wish."""

import json
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.logging import disable_run_logger

from tasks.errors import RefusedInput
from tasks.params import Params, SmolLM2Params, parse_params
from tasks.precision import decide_precision, plan_precision
from tasks.records import FormatSupport, Hardware, PrecisionPlan, Support
from tests.builds import SCRATCH
from tests.machines import DECISIONS, NAMES, UNUSABLE, hardware_of

LABELS = ("bf16", "fp16", "fp32")
THIS_KIND = "cpu_epyc_9r14"


def params_with(retries: object = None, training: dict[str, object] | None = None, **precision: object) -> Params:
    memory = {} if retries is None else {"retries": retries}
    return parse_params({"precision": precision, "memory": memory, "training": training or {}}, "test")


def planned(plan: PrecisionPlan) -> list[str]:
    return [attempt.precision.label for attempt in plan.attempts]


def support_of(hardware: Hardware, label: str) -> FormatSupport:
    return {"bf16": hardware.bf16, "fp16": hardware.fp16, "fp32": FormatSupport(level=Support.native, fact="fp32 runs")}[label]


@pytest.mark.parametrize("name", NAMES)
def test_auto_on_recorded_machines(name: str) -> None:
    if name not in UNUSABLE:
        attempts = plan_precision(hardware_of(name), params_with()).attempts
        assert tuple(attempt.precision.label for attempt in attempts if attempt.label != "fallback") == DECISIONS[name].plan


def test_h1_no_bf16_attempt_on_cards_that_emulate_it_and_the_plan_says_why() -> None:
    for name in ("tesla_t4", "tesla_v100", "tesla_p100"):
        plan = plan_precision(hardware_of(name), params_with())
        assert plan.attempts[0].precision.grad_scaler
        assert "emulates bf16" in plan.reason and "with a grad scaler" in plan.reason
        (ruled_out,) = [item for item in plan.ruled_out if item.precision == "bf16"]
        assert "< 8.0" in ruled_out.reason and "never runs on an accelerator" in ruled_out.reason
    assert "no tensor cores" in plan.reason


def test_h3_apple_chips_that_emulate_bf16_and_those_that_have_it_get_different_plans() -> None:
    assert planned(plan_precision(hardware_of("apple_m2"), params_with())) == ["fp16", "fp16"]
    assert planned(plan_precision(hardware_of("apple_m3_max"), params_with())) == ["bf16", "fp16"]


def test_h7_bf16_by_name_on_a_v100_is_refused_with_the_remedy() -> None:
    found = r"precision\.mode is 'bf16' but Tesla V100-SXM2-32GB only emulates bf16 \(compute capability 7\.0 < 8\.0"
    message = found + ".*set precision.mode to 'auto' or 'fp16' or 'fp32'$"
    for allow_emulated in (False, True):
        with pytest.raises(RefusedInput, match=message):
            plan_precision(hardware_of("tesla_v100"), params_with(mode="bf16", allow_emulated=allow_emulated))


def test_on_a_cpu_emulated_fp16_retry_is_a_rehearsal_when_allowed() -> None:
    plan = plan_precision(hardware_of(THIS_KIND), params_with(allow_emulated=True))
    assert planned(plan) == ["bf16", "fp16"]
    assert [attempt.rehearsal for attempt in plan.attempts] == [False, True]
    assert "rehearsal" in plan.attempts[1].reason and "2-retry-fp16 (a rehearsal)" in plan.reason
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
    for lever in ("micro-batch 8 -> 4", "gradient checkpointing off -> on", "effective batch stays 32"):
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
        ("tesla_t4", {"mode": "bf16", "grad_scaler": False}, None, "set precision.mode to 'auto' and precision.grad_scaler to 'auto'$"),
        ("tesla_t4", {"mode": "fp16", "grad_scaler": True}, [{"precision": "fp32"}], r"memory.retries\[0\] runs in fp32, which has no use"),
    ],
)
def test_a_contradiction_about_the_grad_scaler_is_refused(name: str, precision: dict[str, object], retries: object, message: str) -> None:
    with pytest.raises(RefusedInput, match=message):
        plan_precision(hardware_of(name), params_with(retries=retries, **precision))


def test_an_objective_is_left_to_auto_and_a_named_mode_overrules_it() -> None:
    plan = plan_precision(hardware_of("mi300x"), params_with(objective="consistency"))
    assert planned(plan) == ["fp16", "fp16"]
    (bf16,) = [item for item in plan.ruled_out if item.precision == "bf16"]
    assert "starts in fp16" in bf16.reason
    named = plan_precision(hardware_of("mi300x"), params_with(mode="bf16", objective="memory"))
    assert "the mode overrules precision.objective 'memory'" in named.reason
    assert not named.attempts[0].levers.gradient_checkpointing


def test_the_objective_memory_starts_with_gradient_checkpointing_and_the_retry_pulls_the_rest() -> None:
    first, retry = plan_precision(hardware_of("mi300x"), params_with(objective="memory")).attempts
    assert first.levers.gradient_checkpointing and "gradient checkpointing from the start" in first.reason
    assert "Levers pulled: micro-batch 8 -> 4; the" in retry.reason


@pytest.mark.parametrize(("wish", "then"), [("stop", "the run stops"), ("next", "a fallback goes on from the last training state")])
def test_an_fp16_attempt_of_a_model_stored_in_bf16_carries_a_range_warning(wish: str, then: str) -> None:
    attempts = plan_precision(hardware_of("mi300x"), params_with(on_divergence=wish)).attempts
    assert all("weights are stored in bfloat16" in attempt.reason for attempt in attempts)
    assert ["65504" in attempt.reason for attempt in attempts] == [attempt.precision.label == "fp16" for attempt in attempts]
    for words in ("cannot mend an overflow in the forward", "10 skipped steps in a row count as divergence", then):
        assert words in attempts[1].reason
    scratch = params_with(mode="fp16", on_divergence=wish).model_copy(update={"base_model": SCRATCH})
    reason = plan_precision(hardware_of("mi300x"), scratch).attempts[0].reason
    assert "stored in float32" in reason and "65504" not in reason


def test_the_stored_dtype_is_the_one_that_is_built(smollm2_dir: Path, scratch_model_dir: Path) -> None:
    for params, folder in ((SmolLM2Params(), smollm2_dir), (SCRATCH, scratch_model_dir)):
        assert json.loads((folder / "config.json").read_text())["dtype"] == params.stored_dtype


def test_rollout_dtype_and_head_are_planned_for_every_attempt() -> None:
    following = plan_precision(hardware_of("mi300x"), params_with())
    assert [item.precision.sampling_dtype for item in following.attempts] == ["bfloat16", "float16"]
    plan = plan_precision(hardware_of("mi300x"), params_with(rollout_dtype="float16", lm_head_fp32=True))
    for attempt in plan.attempts:
        assert (attempt.precision.rollout_dtype, attempt.precision.lm_head_fp32) == ("float16", True)
        assert "samples in float16 (precision.rollout_dtype)" in attempt.reason and "head computes in fp32" in attempt.reason
    assert "may overflow float16 in the rollout" in plan.attempts[0].reason


def test_a_rollout_dtype_that_an_accelerator_emulates_is_refused_and_on_a_cpu_it_is_a_rehearsal() -> None:
    wish = params_with(rollout_dtype="bfloat16")
    message = r"rollout_dtype is 'bfloat16' but Tesla T4 only emulates bf16 \(.*\), and .*; set precision.rollout_dtype to 'auto'$"
    with pytest.raises(RefusedInput, match=message):
        plan_precision(hardware_of("tesla_t4"), wish)
    assert all(attempt.rehearsal for attempt in plan_precision(hardware_of("cpu_xeon_6252n_container"), wish).attempts)


def test_fallbacks_come_last_and_only_when_asked_for() -> None:
    plan = plan_precision(hardware_of("mi300x"), params_with(on_divergence="next"))
    assert [item.name for item in plan.attempts] == ["1-baseline-bf16", "2-retry-fp16", "3-fallback-bf16", "4-fallback-fp32"]
    assert plan.ruled_out == ()
    assert "After a divergence in bf16 or fp16: 3-fallback-bf16, then 4-fallback-fp32" in plan.reason
    assert "After a divergence: stop, precision.on_divergence is 'stop'" in plan_precision(hardware_of("mi300x"), params_with()).reason
    alone = plan_precision(hardware_of("mi300x"), params_with(mode="fp32", retries=[], on_divergence="next"))
    assert "After a divergence: stop, nothing is wider than fp32" in alone.reason


def test_on_a_cpu_an_emulated_fallback_is_a_rehearsal_and_only_where_that_is_allowed() -> None:
    for allowed, names in ((True, ["2-fallback-bf16", "3-fallback-fp32"]), (False, ["2-fallback-fp32"])):
        params = params_with(mode="fp16", retries=[], on_divergence="next", allow_emulated=allowed)
        plan = plan_precision(hardware_of("cpu_xeon_6252n_container"), params)
        assert [item.name for item in plan.attempts[1:]] == names
        assert [item.rehearsal for item in plan.attempts] == [True, allowed, False][: len(names) + 1]


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
            "objective": st.sampled_from(["stability", "consistency", "speed", "memory"]),
            "rollout_dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
            "on_divergence": st.sampled_from(["stop", "next"]),
            "lm_head_fp32": st.booleans(),
        }
    ),
)


@settings(deadline=None, max_examples=400)
@given(machines, wishes)
def test_every_plan_holds_and_every_refusal_names_what_is_then_accepted(hardware: Hardware, params: Params) -> None:
    try:
        plan = plan_precision(hardware, params)
    except RefusedInput as refusal:
        wished = params.precision
        assert (wished.mode, wished.grad_scaler, wished.rollout_dtype) != ("auto", "auto", "auto")
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
        sets = re.findall(r"precision\.(\w+) to ('\w+'(?:, '\w+')*(?: or '\w+')?)", way)
        values = product(*(re.findall(r"'(\w+)'", allowed) for _, allowed in sets))
        remedies += [dict(zip([name for name, _ in sets], chosen, strict=True)) for chosen in values if sets]
    return remedies


def check_plan(plan: PrecisionPlan, hardware: Hardware, params: Params) -> None:
    retries = len(params.memory.retries)
    kinds = [attempt.label for attempt in plan.attempts]
    assert [attempt.number for attempt in plan.attempts] == list(range(1, len(kinds) + 1))
    assert kinds == ["baseline"] + ["retry"] * retries + ["fallback"] * (len(kinds) - retries - 1)
    narrow = {attempt.precision.label for attempt in plan.attempts[: retries + 1]} - {"fp32"}
    assert ("fallback" in kinds) == (params.precision.on_divergence == "next" and narrow != set())
    asked = params.precision.rollout_dtype
    for attempt in plan.attempts:
        label = attempt.precision.label
        support = support_of(hardware, label)
        assert support.level is Support.native or (support.level is Support.emulated and hardware.device_type == "cpu")
        assert attempt.precision.sampling_dtype == (attempt.precision.autocast_dtype if asked == "auto" else asked)
        sampling = support_of(hardware, {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[attempt.precision.sampling_dtype])
        assert sampling.level is Support.native or (sampling.level is Support.emulated and hardware.device_type == "cpu")
        assert attempt.rehearsal == (Support.emulated in (support.level, sampling.level))
        assert f"stored in {params.base_model.stored_dtype}" in attempt.reason
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
        assert (params.precision.objective in plan.reason) == (params.precision.objective != "stability")
    else:
        assert f"objective {params.precision.objective!r}" in plan.reason
    if params.precision.mode == "auto" and not params.precision.allow_emulated and asked == "auto":
        assert not any(attempt.rehearsal for attempt in plan.attempts)
