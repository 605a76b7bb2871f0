"""What the steps' metrics warn of (cases G1, G2)."""

from tasks.warning_signs import always, warning_signs


def test_each_sign_is_named_once_with_its_first_step_and_its_count() -> None:
    steps = [
        {"step": 1.0, "completions/clipped_ratio": 0.5, "frac_reward_zero_std": 0.25, "loss_scale": 1.0},
        {"step": 2.0, "completions/clipped_ratio": 1.0, "frac_reward_zero_std": 1.0, "loss_scale": 0.5, "step_skipped": 1.0},
        {"step": 3.0, "completions/clipped_ratio": 1.0, "frac_reward_zero_std": 0.0, "loss_scale": 0.5, "step_skipped": 0.0},
    ]
    found = {item.name: (item.step, item.message.rpartition("(")[2]) for item in warning_signs(steps)}
    assert found == {
        "clipped_completions": (2, "2 of 3 steps)"),
        "no_signal": (2, "1 of 3 steps)"),
        "skipped_steps": (2, "1 of 3 steps)"),
        "loss_scale_collapsed": (2, "2 of 3 steps)"),
    }


def test_a_clean_run_warns_of_nothing() -> None:
    assert warning_signs([{"step": 1.0, "completions/clipped_ratio": 0.0, "frac_reward_zero_std": 0.0, "loss_scale": 65536.0}]) == ()


def test_always_needs_a_step() -> None:
    assert not always("no_signal", [])
    assert always("no_signal", [{"frac_reward_zero_std": 1.0}])
    assert not always("no_signal", [{"frac_reward_zero_std": 1.0}, {"frac_reward_zero_std": 0.5}])
