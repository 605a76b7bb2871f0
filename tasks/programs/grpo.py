"""TRL's GRPOTrainer with a live grad scaler on every device, a rollout in a dtype of its own, clocks and meters."""

import contextlib
import copy
import functools
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.trainer import SCHEDULER_NAME
from trl import GRPOTrainer

from tasks.attempt_files import STATE_PREFIX, training_states
from tasks.errors import Diverged
from tasks.files import write_record
from tasks.params import PrecisionParams
from tasks.programs.adapters import LEVERS_FILE, same_optimizer
from tasks.programs.half_precision import read_head_once
from tasks.programs.mismatch import MismatchMeter, NonFiniteLogits, SamplingRecorder
from tasks.programs.observation import RANGE_PROBLEM, GradientScan, first_non_finite_layer, muted_observers, scan_gradients
from tasks.programs.step_watch import StepWatch
from tasks.records import Attempt

NUM_STATES_KEPT = 2
SCALER_ARGUMENTS = {"init_scale", "growth_interval", "growth_factor", "backoff_factor"}
THE_LOSS = "the loss itself"


class MeteredGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that runs the precision it was given and says where it is.

    ``args.output_dir`` receives whole training states: each is written aside and renamed, the last two are kept.
    """

    def __init__(self, *args: Any, attempt: Attempt, scaler_params: PrecisionParams, watch: StepWatch, **kwargs: Any) -> None:
        # set first: the base constructor calls create_accelerator_and_postprocess
        self.precision, self._levers = attempt.precision, attempt.levers
        self._scaler_params = scaler_params
        self.watch = watch
        self.model_wrapped: Any = None
        self.state_owed = False
        self._train_log_probs: torch.Tensor | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; where it left out autocast and scaler (fp16 on a CPU), put them in."""
        super().create_accelerator_and_postprocess()
        if self.precision.grad_scaler:
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler(
                self.accelerator.device.type, **self._scaler_params.model_dump(include=SCALER_ARGUMENTS)
            )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer; on CUDA torch's AdamW would step over all weights at once, with temporaries as large as the model."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        for group in optimizer.param_groups:
            group["foreach"] = False
        return optimizer

    def begin_step(self) -> None:
        """Forget what was measured in the last optimizer step."""
        self.watch.begin_step()
        self.mismatch = MismatchMeter()
        self.gradient_scan: GradientScan | None = None
        self.forward_overflow: str | None = None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        """Run one micro-batch under the clocks."""
        with self.watch.timed("micro_batch"):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.watch.loss += loss.item()
        return loss

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        self.watch.phase = "rollout"
        with self.watch.timed("rollout"):
            return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.watch.num_tokens += int(output["prompt_mask"].sum() + output["completion_mask"].sum())
        return output

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss and the mismatch; what follows until the next phase is the backward."""
        self.watch.phase = "forward"
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if self._train_log_probs is not None:
            self.mismatch.add(self._train_log_probs, inputs["sampling_per_token_logps"], inputs["completion_mask"])
        if self.forward_overflow is None and not torch.isfinite(loss):
            token_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            with self.accelerator.autocast():
                # unwrapped: other ranks do not take part in this forward
                self.forward_overflow = first_non_finite_layer(self.accelerator.unwrap_model(model), token_ids, mask) or THE_LOSS
        self.watch.phase = "backward"
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # with adapters the reference is the training model, whose forward must not be taken for the rollout's
        with contextlib.nullcontext() if torch.is_grad_enabled() else muted_observers():
            result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if torch.is_grad_enabled():
            self._train_log_probs = result[0].detach()
        return result

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        # before clipping, which spreads one infinite gradient over all of them
        if self.accelerator.scaler is not None:
            self.gradient_scan = scan_gradients(self.accelerator.unwrap_model(model))
        return super()._clip_grad_norm(model)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]]]:
        chunk = self._levers.rollout_batch_size or len(prompt_ids)
        completion_ids: list[list[int]] = []
        log_probs: list[list[float]] = []
        with self._rollout_policy() as policy:
            for start in range(0, len(prompt_ids), chunk):
                recorder = SamplingRecorder(self.temperature)
                policy.generate = functools.partial(type(policy).generate, policy, logits_processor=LogitsProcessorList([recorder]))
                prompts = prompt_ids[start : start + chunk]
                try:
                    part, _ = super()._generate_single_turn(prompts, *args, **kwargs)
                    log_probs.extend(recorder.log_probs(part))
                except NonFiniteLogits as error:
                    remedy = RANGE_PROBLEM if self.precision.sampling_dtype == "float16" else "The weights can no longer be trusted"
                    raise NonFiniteLogits(f"{error}: {_where_not_finite(policy, prompts)}. {remedy}") from None
                completion_ids.extend(part)
        return completion_ids, log_probs

    @contextlib.contextmanager
    def _rollout_policy(self) -> Iterator[PreTrainedModel]:
        # autocast would cast the fp32 weights again for every token; a copy in the rollout's dtype lives for one rollout only
        training_model = self.model_wrapped
        policy = self.accelerator.unwrap_model(self.model)
        copied = (self.precision.mixed_precision, self.precision.sampling_dtype) != ("no", "float32")
        if copied:
            self.model_wrapped = policy = cast_copy(policy, getattr(torch, self.precision.sampling_dtype))
        hook = read_head_once(policy)
        try:
            yield policy
        finally:
            hook.remove()
            self.model_wrapped = training_model
            policy.__dict__.pop("generate", None)
            if copied:
                # modules lie in reference cycles: without this the weights would stay until the next garbage collection
                for weight in policy.parameters():
                    weight.data = weight.data.new_empty(0)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or same_optimizer(Path(checkpoint), self._levers):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        # the schedule alone: the rate of the next step is kept in the optimizer's states
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_scaler(self, checkpoint: str | None) -> None:
        # a state may come from an attempt in another precision
        if self.accelerator.scaler is not None:
            super()._load_scaler(checkpoint)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: the run's record says what the checkpoint is."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir, ".writing"))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # a state stands for steps that trained: what goes on from it must not count a skipped step as done
        self.state_owed = bool(self.accelerator.optimizer_step_was_skipped)
        if self.state_owed:
            return
        check_finite(self.accelerator.unwrap_model(model))
        self.watch.phase = "save"
        super()._save_checkpoint(model, trial)
        # each rank writes the state of its random numbers
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self._keep_state()
        self.watch.phase = "optimizer"

    def _keep_state(self) -> None:
        states_dir, name = Path(self.args.output_dir), f"{STATE_PREFIX}{self.state.global_step}"
        write_record(states_dir / ".writing" / name / LEVERS_FILE, self._levers)
        shutil.rmtree(states_dir / name, ignore_errors=True)
        (states_dir / ".writing" / name).rename(states_dir / name)
        for old in training_states(states_dir)[:-NUM_STATES_KEPT]:
            shutil.rmtree(old)


def check_finite(model: nn.Module) -> None:
    """Raise Diverged if a weight is NaN or inf, so that no state or checkpoint holds one."""
    broken = [name for name, weight in model.named_parameters() if not torch.isfinite(weight).all()]
    if broken:
        raise Diverged(f"{len(broken)} weight tensors are no longer finite, the first is {broken[0]}")


def weights_digest(model: nn.Module) -> str:
    """Return a hash of all weights that are trained, byte for byte."""
    digest = hashlib.sha256()
    for weight in filter(lambda weight: weight.requires_grad, model.parameters()):
        digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def cast_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of `model` whose weights are cast to `dtype`; buffers keep theirs, tied weights stay tied.

    Weights that are in `dtype` already, such as those below adapters, are shared with the original. A language-model head
    that TRL made compute in fp32 goes on doing so, on the original weights.
    """
    memo: dict[int, Any] = {id(weight): nn.Parameter(weight.detach().to(dtype), requires_grad=False) for weight in model.parameters()}
    clone = copy.deepcopy(model, memo)
    # TRL and accelerate replace the instance's forward by closures over the original model; the class's own is meant
    for part in (clone, clone.get_base_model()) if isinstance(clone, PeftModel) else (clone,):
        part.__dict__.pop("forward", None)
        part.__dict__.pop("_original_forward", None)
    # for an fp32 head TRL casts the embeddings' output to the dtype of the training weights
    clone.get_input_embeddings()._forward_hooks.clear()
    return clone


def _where_not_finite(policy: PreTrainedModel, prompts: list[list[int]]) -> str:
    layers = (first_non_finite_layer(policy, torch.tensor([ids], device=policy.device)) for ids in prompts)
    layer = next((name for name in layers if name), None)
    return f"the output of {layer} is the first that is not" if layer else "the prompts alone are, the tokens sampled after them are not"
