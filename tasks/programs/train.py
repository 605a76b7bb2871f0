"""Run one training attempt.

Launch: ``python -m tasks.programs.train ATTEMPT_DIR``; ``tasks.programs.ranks`` launches it as one of several. Reads
``attempt.json`` (a TrainingJob), appends to ``metrics.jsonl`` a line a step, keeps training states under ``states/`` and the
trained weights in ``checkpoint/``, and writes ``outcome.json`` (an Outcome) last. Needs torch, transformers, trl, accelerate and
datasets; no prefect, mlflow or dvc.
"""

import contextlib
import signal
import statistics
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig

from tasks.attempt_files import METRICS_FILE, PHASE_FILE, last_training_state, state_step
from tasks.errors import Diverged, HalfstepError, NothingLearned
from tasks.files import read_record, write_record
from tasks.memory import MB, classify_shortage, evidence_of, free_bytes, requested_bytes
from tasks.params import Params, TrainingParams
from tasks.programs import lifecycle
from tasks.programs.adapters import lora_config, same_optimizer, save_model
from tasks.programs.device_memory import DeviceMemory, detect_device_type, device_memory
from tasks.programs.grpo import MeteredGRPOTrainer, check_finite, weights_digest
from tasks.programs.half_precision import fast_half_matmul
from tasks.programs.observation import PrecisionObserver, check_observed
from tasks.programs.problems import TRAIN_FILE, Row, read_problems
from tasks.programs.process_group import backend_of, join_ranks
from tasks.programs.rewards import load_scorer, rehearse
from tasks.programs.step_log import StepLog
from tasks.programs.step_watch import StepWatch
from tasks.rank_outcomes import rank_dir
from tasks.records import Attempt, DeviceType, Failure, ObservedPrecision, Outcome, Status, TrainingJob, WeightsDtype
from tasks.warning_signs import always, warning_signs

# fields of training that GRPOConfig does not have; all others bear its names, and a lever goes before the field of its name
UNKNOWN_TO_TRL = {"engine", "engine_args", "strategy", "num_processes", "rollout_batch_size", "compact_allocator"}
UNKNOWN_TO_TRL |= {"optimizer_8bit", "lora_rank", "lora_alpha"}


class TrainingRun:
    """One attempt, from loading to the saved checkpoint; `outcome` can be asked for at any moment."""

    def __init__(self, job: TrainingJob, device_type: DeviceType, memory: DeviceMemory, out_dir: Path) -> None:
        self.job = job
        self.params = Params.model_validate(job.params)
        self.memory = memory
        self.device_type = device_type
        self.states_dir = job.attempt_dir / "states"
        self.watch = StepWatch(out_dir / PHASE_FILE)
        self.observer = PrecisionObserver()
        self.log: StepLog | None = None
        self.trainer: MeteredGRPOTrainer | None = None
        self.first_step = state_step(job.attempt.resume_from)
        self.weights_changed: bool | None = None
        self.checkpoint_dir: Path | None = None

    def run(self) -> None:
        """Load, train, check and save; raises whatever goes wrong."""
        if self.params.memory.budget_mb is not None:
            self.memory.set_budget(int(self.params.memory.budget_mb * MB))
        self.states_dir.mkdir(parents=True, exist_ok=True)
        state, precision, levers = self.job.attempt.resume_from, self.job.attempt.precision, self.job.attempt.levers
        if state and not same_optimizer(state, levers):
            print(f"the optimizer's states begin anew: {state.name} has them in {32 if levers.optimizer_8bit else 8} bits", flush=True)
        model = _load_model(self.job.base_model_dir, self.device_type, precision.autocast_dtype if levers.lora_rank else "float32")
        trainer = self._build_trainer(model)
        base = weights_digest(trainer.model)
        if state and self.first_step >= self.params.training.max_steps:
            # every step is done: transformers would do one more
            trainer._load_from_checkpoint(str(state))
        else:
            with fast_half_matmul(self.device_type, precision.autocast_dtype, precision.sampling_dtype):
                trainer.train(resume_from_checkpoint=str(state) if state else None)
            self._check_observed()
        self._check_result(trainer, (self.log and self.log.weights_at_start) or base)
        if trainer.accelerator.is_main_process:
            self._save(trainer)

    def _build_trainer(self, model: PreTrainedModel) -> MeteredGRPOTrainer:
        attempt = self.job.attempt
        scorer = load_scorer(self.params.reward, self.params.dataset)
        problems = read_problems(self.job.dataset_dir / TRAIN_FILE)
        rehearse(scorer, problems[:4])

        def reward(completions: list[str], question: list[str], answer: list[str], entry: list[str], **_: Any) -> list[float]:
            return scorer(completions, [Row(*fields) for fields in zip(question, answer, entry, strict=True)])

        # below adapters TRL looks for it here (lm_head_fp32 with tied embeddings)
        model.__dict__["embed_tokens"] = model.get_input_embeddings()
        trainer = MeteredGRPOTrainer(
            model=model,
            reward_funcs=[reward],
            args=grpo_config(attempt, self.params.training, self.states_dir, self.device_type),
            train_dataset=datasets.Dataset.from_list([asdict(row) for row in problems]),
            processing_class=AutoTokenizer.from_pretrained(self.job.base_model_dir, padding_side="left", local_files_only=True),
            attempt=attempt,
            scaler_params=self.params.precision,
            peft_config=lora_config(attempt.levers, self.params.training.lora_alpha),
            watch=self.watch,
        )
        self.trainer = trainer
        self.observer.attach(trainer.model)
        self.log = StepLog(self.job.attempt_dir / METRICS_FILE, trainer, self.memory, self.params.precision, self._check_observed)
        trainer.add_callback(self.log)
        return trainer

    def _check_observed(self) -> None:
        if observed := self._observed():
            check_observed(observed, self.job.attempt.precision)

    def _observed(self) -> ObservedPrecision | None:
        scaler = self.trainer.accelerator.scaler if self.trainer else None
        return self.observer.result(self.trainer.model, scaler is not None and scaler.is_enabled()) if self.trainer else None

    def _check_result(self, trainer: MeteredGRPOTrainer, before: str) -> None:
        check_finite(trainer.model)
        after = weights_digest(trainer.model)
        if self.params.training.num_processes > 1:
            print(f"weights at the end: {after}", flush=True)
        if len(set(gather_object([after]))) > 1:
            raise HalfstepError("the ranks ended with different weights, so that they did not train one model")
        self.weights_changed = after != before
        # transformers keeps the steps of the whole run in its state, those before a resume too
        silent = always("no_signal", [step for step in trainer.state.log_history if "reward" in step])
        if silent or not self.weights_changed:
            found = "in no step did the completions of a group differ in reward" if silent else "the weights are those it started from"
            raise (NothingLearned if silent else Diverged)(f"training ended and nothing was learned: {found}")

    def _save(self, trainer: MeteredGRPOTrainer) -> None:
        self.watch.phase = "save"
        writing = self.job.attempt_dir / ".checkpoint"
        save_model(trainer.accelerator.unwrap_model(trainer.model), writing)
        trainer.processing_class.save_pretrained(writing)
        self.checkpoint_dir = writing.rename(self.job.attempt_dir / "checkpoint")

    def outcome(self, status: Status, failure: Failure | None = None, **more: Any) -> Outcome:
        """Describe the attempt as it stands; nothing is asked of the device, which may have failed."""
        steps = self.log.history if self.log else []
        timed = steps[1:] or steps
        return Outcome(
            status=status,
            observed=self._observed() if steps else None,
            final_loss_scale=steps[-1].get("loss_scale") if steps else None,
            skipped_steps=self.log.skipped_steps if self.log else 0,
            peak_memory_bytes=self.memory.peak_bytes(),
            first_step=self.first_step,
            steps_done=int(steps[-1]["step"]) if steps else self.first_step,
            total_steps=self.params.training.max_steps,
            step_time_ms=statistics.median(line["step_time_ms"] for line in timed) if timed else None,
            tokens_per_second=statistics.median(line["tokens_per_second"] for line in timed) if timed else None,
            weights_changed=self.weights_changed,
            checkpoint_dir=self.checkpoint_dir,
            last_state_dir=last_training_state(self.job.attempt_dir) or self.job.attempt.resume_from,
            failure=failure,
            warnings=(*warning_signs(steps), *(self.log.overflow_warning() if self.log else ())),
            **more,
        )


def grpo_config(attempt: Attempt, training: TrainingParams, states_dir: Path, device_type: DeviceType) -> GRPOConfig:
    """Translate an attempt into TRL's configuration; every precision flag is said explicitly."""
    same_named = training.model_dump(exclude=UNKNOWN_TO_TRL) | attempt.levers.model_dump(exclude=UNKNOWN_TO_TRL, exclude_none=True)
    return GRPOConfig(
        **_engine_args(attempt, training, device_type),
        **same_named,
        output_dir=str(states_dir),
        bf16=attempt.precision.mixed_precision == "bf16",
        fp16=attempt.precision.mixed_precision == "fp16",
        use_cpu=device_type == "cpu",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        cast_lm_head_to_fp32=attempt.precision.lm_head_fp32,
        ddp_backend=backend_of(device_type) if training.strategy == "ddp" else None,
        # every weight that is trained takes part in every loss
        ddp_find_unused_parameters=False,
        save_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        # a fused optimizer hides a skipped step from accelerate, and the schedule would move on it
        optim="adamw_bnb_8bit" if attempt.levers.optimizer_8bit else "adamw_torch",
        dataloader_pin_memory=device_type in ("cuda", "rocm"),
    )


def _engine_args(attempt: Attempt, training: TrainingParams, device_type: DeviceType) -> dict[str, Any]:
    if attempt.levers.rollout_batch_size is None or device_type != "cpu":
        return training.engine_args
    # a growing KV cache is copied for every token and tears the heap apart: smaller chunks alone would free nothing on a CPU
    own = training.engine_args.get("generation_kwargs", {})
    return {**training.engine_args, "generation_kwargs": {"cache_implementation": "static", **own}}


def _load_model(base_model_dir: Path, device_type: DeviceType, dtype: WeightsDtype) -> PreTrainedModel:
    # torch's fused attention is slower than plain products in the backward on a CPU, for sequences of a few dozen tokens
    attention = "eager" if device_type == "cpu" else "sdpa"
    return AutoModelForCausalLM.from_pretrained(
        base_model_dir, dtype=getattr(torch, dtype), attn_implementation=attention, local_files_only=True, use_safetensors=True
    )


def _failed(run: TrainingRun, error: BaseException) -> Outcome:
    available = None
    run.memory.lift_budget()
    with contextlib.suppress(RuntimeError, MemoryError):  # after some errors a device answers nothing more
        available = run.memory.available_bytes()
    traceback.print_exc()
    evidence = evidence_of(error, run.device_type, available)
    shortage = classify_shortage(evidence)
    free = free_bytes(evidence.message) if shortage else None
    failure = Failure(
        phase=run.watch.phase,
        error_type=type(error).__name__,
        message=evidence.message if shortage else str(error) or type(error).__name__,
        requested_bytes=requested_bytes(evidence.message) if shortage else None,
        available_bytes=available if free is None else free,
    )
    status: Status = "out_of_memory" if shortage else "diverged" if isinstance(error, Diverged) else "failed"
    return run.outcome(status, failure, shortage=shortage)


def outcome_of(run: TrainingRun) -> Outcome:
    """Run an attempt to its end, whichever that is, and describe it."""
    try:
        run.run()
        return run.outcome("succeeded")
    except lifecycle.StopRequested:
        return run.outcome("cancelled")
    except Exception as error:  # the outcome must say how any attempt ended
        return _failed(run, error)


def main() -> int:
    """Run the attempt whose folder is the only argument; the result is outcome.json, of a rank in a folder of its own."""
    lifecycle.start()
    try:
        out_dir = attempt_dir = Path(sys.argv[1])
        device_type = detect_device_type()
        job = read_record(attempt_dir / "attempt.json", TrainingJob)
        num_processes = Params.model_validate(job.params).training.num_processes
        if num_processes > 1:
            # before the memory's floor is taken, which it would be part of otherwise
            out_dir = rank_dir(attempt_dir, join_ranks(job, num_processes, device_type))
        run = TrainingRun(job, device_type, device_memory(device_type), out_dir)
    except lifecycle.StopRequested:
        return 128 + signal.SIGTERM
    outcome = outcome_of(run)
    write_record(out_dir / "outcome.json", outcome)
    if outcome.status == "cancelled":
        lifecycle.end_group()
    return 0 if outcome.status == "succeeded" else 1


if __name__ == "__main__":
    raise SystemExit(main())
