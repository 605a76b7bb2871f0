"""What a retry pulls, what it says of it, and what of it never changes."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.levers import baseline_levers, changes, levers_pulled, retry_levers, single_levers, thriftier
from tasks.params import Params, RetryParams, load_params
from tasks.places import PROJECT_DIR
from tasks.report import overrides_text


def params(training: dict[str, object], *retries: dict[str, object]) -> Params:
    return Params.model_validate({"training": training, "memory": {"retries": retries}})


def test_the_baseline_takes_its_levers_from_training() -> None:
    levers = baseline_levers(params({"optimizer_8bit": True, "compact_allocator": True, "lora_rank": 8}))
    assert (levers.optimizer_8bit, levers.compact_allocator, levers.lora_rank, levers.max_completion_length) == (True, True, 8, None)
    assert not baseline_levers(Params()).gradient_checkpointing


def test_a_retry_adds_to_what_the_baseline_pulls_and_takes_nothing_back() -> None:
    old = baseline_levers(params({"optimizer_8bit": True, "lora_rank": 8}))
    new = retry_levers(old, RetryParams(compact_allocator=True, max_completion_length=4))
    assert (new.optimizer_8bit, new.compact_allocator, new.lora_rank, new.max_completion_length) == (True, True, 8, 4)
    assert retry_levers(old, RetryParams(lora_rank=2)).lora_rank == 2


def test_every_lever_is_named_old_and_new_and_what_changes_the_task_says_so() -> None:
    old = baseline_levers(Params())
    retry = RetryParams(optimizer_8bit=True, compact_allocator=True, lora_rank=16, max_completion_length=8)
    assert levers_pulled(old, retry_levers(old, retry)) == (
        "Levers pulled: micro-batch 8 -> 4, gradient checkpointing off -> on, 8-bit optimizer states off -> on, compact allocator "
        "off -> on, LoRA rank (changes the task) all -> 16, completion length (changes the task) all -> 8; the effective batch stays 32"
    )
    one = old.model_copy(update={"per_device_train_batch_size": 1})
    told = "Levers pulled: gradient checkpointing off -> on; the micro-batch stays 1, the effective batch stays 4"
    assert levers_pulled(one, retry_levers(one, RetryParams())) == told
    unchanged = retry_levers(old, RetryParams(micro_batch_divisor=1, gradient_checkpointing=False))
    assert levers_pulled(old, unchanged).startswith("No lever is pulled")


def test_the_way_from_baseline_to_retry_is_one_lever_at_a_time_and_ends_at_the_retry() -> None:
    baseline = baseline_levers(Params())
    retry = retry_levers(baseline, RetryParams())
    steps = changes(baseline, retry)
    assert [(step.lever, step.text) for step in steps] == [("micro-batch", "8 -> 4"), ("gradient checkpointing", "off -> on")]
    assert steps[-1].levers == retry and {step.levers.effective_batch_size for step in steps} == {32}
    assert changes(baseline, baseline) == []


def test_each_lever_that_is_not_yet_pulled_is_shown_alone() -> None:
    baseline = baseline_levers(Params())
    alone = single_levers(baseline, compact=True)
    assert [(change.lever, change.text) for change in alone] == [
        ("micro-batch", "8 -> 4"),
        ("gradient checkpointing", "off -> on"),
        ("rollout chunk", "all -> 16"),
        ("8-bit optimizer states", "off -> on"),
        ("compact allocator", "off -> on"),
        ("LoRA rank", "all -> 16"),
    ]
    assert all(len(changes(baseline, change.levers)) == 1 for change in alone)
    spent = thriftier(baseline, compact=True)[-3]
    assert [change.lever for change in single_levers(spent, compact=True)] == ["8-bit optimizer states", "LoRA rank"]


def test_what_might_fit_begins_with_single_levers_can_be_asked_for_and_changes_the_task_last() -> None:
    baseline = baseline_levers(Params())
    ladder = thriftier(baseline, compact=True)
    pulled = [[change.lever for change in changes(baseline, levers)] for levers in ladder]
    exact = ["micro-batch", "gradient checkpointing", "rollout chunk", "compact allocator"]
    states = [*exact[:3], "8-bit optimizer states", exact[3]]
    smaller = [exact] * 4
    wider = [exact[:2], exact[:3], exact, *smaller, states, [*exact, "LoRA rank"]]
    assert pulled == [*([lever] for lever in (*exact, "8-bit optimizer states")), *wider]
    for levers in ladder:
        told = load_params(PROJECT_DIR / "params" / "retrain.yaml", tuple(overrides_text(levers, Params()).split()))
        assert baseline_levers(told) == levers
    assert overrides_text(ladder[0], Params()) == "training.per_device_train_batch_size=4 training.gradient_accumulation_steps=8"


def test_what_might_fit_leaves_out_no_size_between_half_and_one() -> None:
    levers = baseline_levers(params({"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2}))
    sizes = [(one.per_device_train_batch_size, one.rollout_batch_size) for one in thriftier(levers, compact=True)]
    assert list(dict.fromkeys(sizes)) == [(6, None), (12, None), (12, 12), (6, 12), (3, 6), (1, 3), (1, 1)]


def test_what_might_fit_leaves_out_retries_that_could_not_divide_its_micro_batch() -> None:
    asked = params({}, {"micro_batch_divisor": 4})
    half = thriftier(baseline_levers(asked), compact=True)[0]
    assert overrides_text(half, asked).endswith("training.gradient_accumulation_steps=8")
    quarter = half.model_copy(update={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16})
    assert overrides_text(quarter, asked).endswith("training.gradient_accumulation_steps=16 memory.retries=[]")


def test_no_compact_allocator_is_advised_where_none_is_known() -> None:
    baseline = baseline_levers(Params())
    assert not any(levers.compact_allocator for levers in thriftier(baseline, compact=False))
    assert "compact allocator" not in [change.lever for change in single_levers(baseline, compact=False)]
    assert all(levers.compact_allocator for levers in thriftier(baseline.model_copy(update={"compact_allocator": True}), compact=False))


@given(micro=st.integers(1, 24), accumulation=st.integers(1, 8), generations=st.integers(2, 12))
def test_no_retry_changes_the_effective_batch_or_splits_a_group(micro: int, accumulation: int, generations: int) -> None:
    batch = micro * accumulation * generations
    training = {
        "per_device_train_batch_size": micro * generations,
        "gradient_accumulation_steps": accumulation,
        "num_generations": generations,
    }
    for divisor in (divisor for divisor in range(1, micro * generations + 1) if micro * generations % divisor == 0):
        asked = params(training, {"micro_batch_divisor": divisor})
        levers = retry_levers(baseline_levers(asked), asked.memory.retries[0])
        assert levers.effective_batch_size == batch and batch % generations == 0
