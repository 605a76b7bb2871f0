"""TRL's GRPOTrainer with a live grad scaler on every device, a 16-bit rollout, and clocks."""

import contextlib
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from tasks.attempt_files import STATE_PREFIX, training_states
from tasks.params import PrecisionParams
from tasks.programs.step_watch import StepWatch
from tasks.records import Precision

NUM_STATES_KEPT = 2


class MeteredGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that runs the precision it was given and says where it is.

    `states_dir` receives whole training states: each is written aside and renamed, the last two are kept.
    """

    def __init__(
        self,
        *args: Any,
        precision: Precision,
        scaler_params: PrecisionParams,
        rollout_batch_size: int | None,
        watch: StepWatch,
        states_dir: Path,
        **kwargs: Any,
    ) -> None:
        # set first: the base constructor calls create_accelerator_and_postprocess
        self.precision = precision
        self._scaler_params = scaler_params
        self._rollout_batch_size = rollout_batch_size
        self.watch = watch
        self.model_wrapped: Any = None
        self._states_dir = states_dir

        super().__init__(*args, **kwargs)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return accelerate's grad scaler."""
        scaler: torch.amp.GradScaler | None = self.accelerator.scaler
        return scaler

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; where it left out autocast and scaler (fp16 on a CPU), put them in."""
        super().create_accelerator_and_postprocess()
        if self.precision.grad_scaler:
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler(
                self.accelerator.device.type,
                init_scale=self._scaler_params.init_scale,
                growth_interval=self._scaler_params.growth_interval,
            )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Run one micro-batch under the clocks."""
        with self.watch.micro_batch():
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.watch.add_loss(loss.item())
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        with self.watch.rollout():
            return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.watch.add_tokens(int(output["prompt_mask"].sum() + output["completion_mask"].sum()))
        return output

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; what follows until the next phase is the backward."""
        self.watch.phase = "forward"
        loss = super().compute_loss(*args, **kwargs)
        self.watch.phase = "backward"
        return loss

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        chunk = self._rollout_batch_size or len(prompt_ids)
        completion_ids: list[list[int]] = []
        with self._rollout_policy():
            for start in range(0, len(prompt_ids), chunk):
                part, _ = super()._generate_single_turn(prompt_ids[start : start + chunk], *args, **kwargs)
                completion_ids.extend(part)
        return completion_ids, None

    @contextlib.contextmanager
    def _rollout_policy(self) -> Iterator[None]:
        # autocast would cast the fp32 weights again for every token; a 16-bit copy lives for one rollout only
        if self.precision.mixed_precision == "no":
            yield
            return
        training_model = self.model_wrapped
        clone = half_copy(self.accelerator.unwrap_model(self.model), getattr(torch, self.precision.autocast_dtype))
        self.model_wrapped = clone
        try:
            yield
        finally:
            self.model_wrapped = training_model
            # modules lie in reference cycles: without this the weights would stay until the next garbage collection
            for weight in clone.parameters():
                weight.data = weight.data.new_empty(0)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: the run's record says what the checkpoint is."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._states_dir / ".writing")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.watch.phase = "save"
        super()._save_checkpoint(model, trial)
        name = f"{STATE_PREFIX}{self.state.global_step}"
        shutil.rmtree(self._states_dir / name, ignore_errors=True)
        (self._states_dir / ".writing" / name).rename(self._states_dir / name)
        for old in training_states(self._states_dir)[:-NUM_STATES_KEPT]:
            shutil.rmtree(old)


def half_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of `model` whose weights are cast to `dtype`; buffers keep theirs, tied weights stay tied."""
    memo: dict[int, Any] = {id(weight): nn.Parameter(weight.detach().to(dtype), requires_grad=False) for weight in model.parameters()}
    memo |= {id(weight.grad): None for weight in model.parameters() if weight.grad is not None}
    clone = copy.deepcopy(model, memo)
    # TRL and accelerate replace the instance's forward by closures over the original model; the class's own is meant
    for name in ("forward", "_original_forward"):
        clone.__dict__.pop(name, None)
    return clone
