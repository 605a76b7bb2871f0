"""Masked rows, empty completions and a pad token that is the end-of-sequence token (cases P7, G3)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tasks.programs.grpo import MeteredGRPOTrainer, cast_copy
from tests.programs.in_process import DEVICE, params_with, train_here
from tests.training_runs import Inputs

pytestmark = pytest.mark.device

Checked = Callable[[MeteredGRPOTrainer], None]


class Passed(Exception):
    """All that was to be checked holds."""


def on_a_trainer(check: Checked, label: str, inputs: Inputs, folder: Path) -> None:
    """Run `check` on a trainer that is ready to train, instead of training."""

    def check_and_end(**_: object) -> None:
        check(trainers[0])
        raise Passed

    def tweak(trainer: MeteredGRPOTrainer) -> None:
        trainers.append(trainer)
        trainer.train = check_and_end

    trainers: list[MeteredGRPOTrainer] = []
    outcome, _ = train_here(params_with(), label, inputs, folder, tweak=tweak)
    assert outcome.failure is not None and outcome.failure.error_type == "Passed", outcome.failure


@pytest.mark.parametrize("label", ["fp32", "bf16", "fp16"])
def test_p7_masked_rows_give_finite_log_probabilities(label: str, scratch_inputs: Inputs, tmp_path: Path) -> None:
    tokens = torch.randint(5, 200, (3, 12), generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0  # left padding
    mask[2] = 0  # nothing but padding

    def check(trainer: MeteredGRPOTrainer) -> None:
        trainer.model.eval()
        log_probs, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, mask, 4)
        assert torch.isfinite(log_probs).all()
        (log_probs * mask[:, -4:]).sum().backward()
        assert all(torch.isfinite(weight.grad).all() for weight in trainer.model.parameters() if weight.grad is not None)
        with torch.no_grad():
            sampling = cast_copy(trainer.model, getattr(torch, trainer.precision.sampling_dtype))
            assert torch.isfinite(sampling(input_ids=tokens, attention_mask=mask).logits).all()
            alone = sampling(input_ids=tokens[1:2, 7:], attention_mask=mask[1:2, 7:]).logits
            padded = sampling(input_ids=tokens[1:2], attention_mask=mask[1:2]).logits[:, 7:]
        # padding changes the products' shapes, and so their rounding, but nothing else
        assert torch.allclose(alone.float(), padded.float(), atol=2e-2)

    on_a_trainer(check, label, scratch_inputs, tmp_path)


@pytest.mark.parametrize("label", ["bf16", "fp16"])
def test_g3_an_empty_completion_is_finite_and_its_eos_is_learned(label: str, scratch_inputs: Inputs, tmp_path: Path) -> None:

    def check(trainer: MeteredGRPOTrainer) -> None:
        eos = trainer.processing_class.eos_token_id
        # completions of nothing but the end, padded with the same token where pad and end are one
        inputs = {
            "prompt_ids": torch.full((2, 3), 40),
            "prompt_mask": torch.ones(2, 3, dtype=torch.long),
            "completion_ids": torch.full((2, 4), eos),
            "completion_mask": torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0]]),
            "advantages": torch.tensor([1.0, 0.5]),
            "num_items_in_batch": torch.tensor(2),
        }
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        trainer.current_gradient_accumulation_steps = 1
        before, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, mask, 4)
        loss = trainer._compute_loss(trainer.model, inputs)
        assert torch.isfinite(loss)
        loss.backward()
        with torch.no_grad():
            for weight in trainer.model.parameters():
                assert torch.isfinite(weight.grad).all()
                weight -= 0.1 * weight.grad
        after, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, tokens, mask, 4)
        # the one token that counts is the end itself
        assert (after[:, 0] > before[:, 0]).all()

    on_a_trainer(check, label, scratch_inputs, tmp_path)
