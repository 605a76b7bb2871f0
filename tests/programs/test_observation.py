"""What was observed is held against what was planned, item by item (case P8)."""

import pytest

from tasks.programs.observation import PrecisionMismatch, check_observed
from tasks.records import ObservedPrecision, Precision

FP16 = Precision(mixed_precision="fp16", grad_scaler=True)
SEEN = ObservedPrecision(
    forward=("float16",),
    backward=("float16",),
    rollout=("float16",),
    rollout_head=("float16",),
    trainable_weights=("float32",),
    scaler_live=True,
)


def test_what_was_planned_passes() -> None:
    check_observed(SEEN, FP16)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"forward": ("float32",)}, "forward ran in float32, planned float16"),
        ({"forward": ("float16", "float32")}, "forward ran in float16, float32"),
        ({"backward": ("float32",)}, "backward ran in float32"),
        ({"backward": ()}, "backward ran in nothing"),
        ({"rollout": ("bfloat16",)}, "rollout ran in bfloat16"),
        ({"rollout_head": ("float32",)}, "rollout's head ran in float32"),
        ({"trainable_weights": ("float16",)}, "trainable weights are in float16, planned float32"),
        ({"scaler_live": False}, "grad scaler is absent"),
    ],
)
def test_each_difference_fails_the_attempt(changed: dict[str, object], said: str) -> None:
    with pytest.raises(PrecisionMismatch, match="planned fp16, but ") as caught:
        check_observed(SEEN.model_copy(update=changed), FP16)
    assert said in str(caught.value)


def test_a_live_scaler_where_none_was_planned_fails_too() -> None:
    bf16 = Precision(mixed_precision="bf16", grad_scaler=False)
    seen = dict.fromkeys(("forward", "backward", "rollout", "rollout_head"), ("bfloat16",))
    with pytest.raises(PrecisionMismatch, match="grad scaler is live"):
        check_observed(SEEN.model_copy(update=seen), bf16)
