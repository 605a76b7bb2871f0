"""TRL's GRPO on one device of this machine, as ``python -m tasks.programs.train``."""

import os
import tempfile
from pathlib import Path

from pydantic import ValidationError

from tasks.attempt_files import last_step, last_training_state
from tasks.engines.base import EngineArgsRequest, EngineCommand
from tasks.errors import RefusedInput
from tasks.files import read_record
from tasks.memory import Evidence, classify_shortage
from tasks.params import Params
from tasks.processes import ProgramExit
from tasks.program_request import ask_program
from tasks.records import Failure, Hardware, Outcome, TrainingJob

# what the training program sets itself on trl.GRPOConfig, by the field of ours that decides it
OWNED_ARGUMENTS: dict[str, str] = {
    "output_dir": "the run folder",
    "bf16": "precision.mode",
    "fp16": "precision.mode",
    "use_cpu": "the detected hardware",
    "per_device_train_batch_size": "training.per_device_train_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "gradient_checkpointing": "training.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "the training program",
    "max_steps": "training.max_steps",
    "learning_rate": "training.learning_rate",
    "lr_scheduler_type": "training.lr_scheduler_type",
    "warmup_steps": "training.warmup_steps",
    "num_generations": "training.num_generations",
    "max_completion_length": "training.max_completion_length",
    "temperature": "training.temperature",
    "cast_lm_head_to_fp32": "precision.lm_head_fp32",
    "beta": "training.beta",
    "loss_type": "training.loss_type",
    "max_grad_norm": "training.max_grad_norm",
    "seed": "training.seed",
    "save_strategy": "training.save_steps",
    "save_steps": "training.save_steps",
    "logging_steps": "the training program",
    "logging_nan_inf_filter": "the training program",
    "report_to": "the flow, which logs to MLflow",
    "disable_tqdm": "the training program",
    "optim": "the training program",
    "dataloader_pin_memory": "the detected hardware",
}
# code from outside, or another way to generate: not what the plan says will run
REFUSED_ARGUMENTS = frozenset(
    {
        "trust_remote_code",
        "use_vllm",
        "use_transformers_continuous_batching",
        "auto_find_batch_size",
        "push_to_hub",
        "num_iterations",
        "steps_per_generation",
        "generation_batch_size",
        "save_only_model",
        "logging_strategy",
    }
)
SIGKILL = -9


class TrlLocal:
    """One process on one device; several devices are left to another engine."""

    def check(self, hardware: Hardware, params: Params) -> None:
        """Refuse engine_args that overlap a field of ours or change what the plan says."""
        for name in params.training.engine_args:
            if name in OWNED_ARGUMENTS:
                raise RefusedInput(f"training.engine_args.{name}: decided by {OWNED_ARGUMENTS[name]}; set it there and remove it here")
            if name in REFUSED_ARGUMENTS:
                raise RefusedInput(f"training.engine_args.{name}: engine trl_local does not run this; remove it")
        if params.training.engine_args:
            with tempfile.TemporaryDirectory() as folder:
                request = EngineArgsRequest(names=tuple(params.training.engine_args))
                ask_program("tasks.programs.check_engine_args", request, Path(folder), lambda line: None)

    def command(self, job: TrainingJob, hardware: Hardware) -> EngineCommand:
        """Return the training program's command; of several devices it sees the first that is visible."""
        environment = {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DO_NOT_TRACK": "1",
            # spinning threads make two processes on one machine tens of times slower
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        if hardware.device_type in ("cuda", "rocm") and hardware.device_count > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        return EngineCommand(module="tasks.programs.train", arguments=(str(job.attempt_dir),), environment=environment)

    def outcome(self, job: TrainingJob, ended: ProgramExit, hardware: Hardware, cgroup_oom_kills: int) -> Outcome:
        """Read ``outcome.json``; without one, tell a kill for memory from any other death by the evidence."""
        try:
            outcome = read_record(job.attempt_dir / "outcome.json", Outcome)
        except (FileNotFoundError, ValidationError):
            return _dead(job, ended, hardware, cgroup_oom_kills)
        if outcome.failure is None:
            return outcome
        return outcome.model_copy(update={"failure": outcome.failure.model_copy(update={"log_tail": ended.log_tail})})


def _dead(job: TrainingJob, ended: ProgramExit, hardware: Hardware, cgroup_oom_kills: int) -> Outcome:
    evidence = Evidence(
        device_type=hardware.device_type,
        message=ended.log_tail,
        killed_by_kernel=ended.returncode == SIGKILL,
        cgroup_oom_kills=cgroup_oom_kills,
        peak_rss_bytes=ended.peak_rss_bytes,
        host_memory_bytes=hardware.host_memory_bytes,
    )
    shortage = classify_shortage(evidence)
    how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
    return Outcome(
        status="out_of_memory" if shortage else "failed",
        shortage=shortage,
        steps_done=last_step(job.attempt_dir),
        total_steps=Params.model_validate(job.params).training.max_steps,
        last_state_dir=last_training_state(job.attempt_dir) or job.attempt.resume_from,
        failure=Failure(
            phase=None,
            error_type="ProcessDied",
            message=f"the training process ended by {how} without an outcome"
            + (f"; the memory cgroup counted {cgroup_oom_kills} kill(s)" if cgroup_oom_kills else ""),
            log_tail=ended.log_tail,
        ),
    )
