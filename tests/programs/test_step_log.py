"""A step's measures over several ranks."""

import math

import pytest

from tasks.programs.step_log import over_ranks


def test_tokens_add_up_and_losses_are_averaged_and_the_slowest_and_largest_count() -> None:
    first = {"loss": 1.0, "mismatch_rms": 3.0, "step_time_ms": 10.0, "tokens_per_second": 100.0, "peak_memory_mb": 7.0}
    second = {"loss": 2.0, "mismatch_rms": 4.0, "step_time_ms": 12.0, "tokens_per_second": 90.0, "peak_memory_mb": 5.0}
    assert over_ranks([first]) is first
    joined = over_ranks([first, second])
    assert joined == {
        "loss": 1.5,
        "mismatch_rms": pytest.approx(math.sqrt(12.5)),
        "step_time_ms": 12.0,
        "tokens_per_second": 190.0,
        "peak_memory_mb": 7.0,
        "peak_memory_mb/device_0": 7.0,
        "peak_memory_mb/device_1": 5.0,
    }


def test_a_nan_of_one_rank_is_not_lost() -> None:
    ranks = [{"loss": 1.0, "mismatch_max": 0.1, "peak_memory_mb": 1.0}, {"loss": math.nan, "mismatch_max": math.nan, "peak_memory_mb": 1.0}]
    for order in (ranks, ranks[::-1]):
        joined = over_ranks(order)
        assert math.isnan(joined["loss"]) and math.isnan(joined["mismatch_max"])
