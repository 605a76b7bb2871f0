"""TRL's GRPO on one device of this machine, as ``python -m tasks.programs.train``."""

import os
import tempfile
from pathlib import Path

from tasks.engines.base import EngineArgsRequest, EngineCommand
from tasks.errors import RefusedInput
from tasks.memory import Evidence, classify_shortage
from tasks.params import Params, TrainingParams
from tasks.processes import ProgramExit
from tasks.program_request import ask_program
from tasks.records import Failure, Hardware, Outcome, TrainingJob
from tasks.run_folder import interrupted_outcome

# what the training program sets itself on trl.GRPOConfig, by what decides it; most are fields of ours of the same name
OWNED_ARGUMENTS: dict[str, str] = {
    **{name: f"training.{name}" for name in TrainingParams.model_fields},
    **dict.fromkeys(("bf16", "fp16"), "precision.mode"),
    **dict.fromkeys(("use_cpu", "dataloader_pin_memory"), "the detected hardware"),
    **dict.fromkeys(("gradient_checkpointing_kwargs", "logging_steps", "logging_nan_inf_filter"), "the training program"),
    **dict.fromkeys(("disable_tqdm", "optim"), "the training program"),
    "cast_lm_head_to_fp32": "precision.lm_head_fp32",
    "save_strategy": "training.save_steps",
    "output_dir": "the run folder",
    "report_to": "the flow, which logs to MLflow",
}
# another way to generate, code from outside, or other states than a resume needs: not what the plan says will run
_ROLLOUT = {"use_vllm", "use_transformers_continuous_batching", "num_iterations", "steps_per_generation", "generation_batch_size"}
REFUSED_ARGUMENTS = _ROLLOUT | {"trust_remote_code", "push_to_hub", "auto_find_batch_size", "save_only_model", "logging_strategy"}
SIGKILL = -9
# oneDNN keeps compiled kernels of the last 1024 shapes, and every length of a growing KV cache is a new shape: bf16 training
# took 20 % more memory, and more with every step; what the limit costs in time was within the noise of a busy machine
CPU_ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}


class TrlLocal:
    """One process on one device; several devices are left to another engine."""

    def check(self, hardware: Hardware, params: Params) -> None:
        """Refuse engine_args that overlap a field of ours or change what the plan says."""
        names = tuple(params.training.engine_args)
        for name in names:
            if name in OWNED_ARGUMENTS:
                owner = OWNED_ARGUMENTS[name]
                there = "set it there and " if "." in owner else ""
                raise RefusedInput(f"training.engine_args.{name}: decided by {owner}; {there}remove it here")
            if name in REFUSED_ARGUMENTS:
                raise RefusedInput(f"training.engine_args.{name}: engine trl_local does not run this; remove it")
        if names:
            with tempfile.TemporaryDirectory() as folder:
                ask_program("tasks.programs.check_engine_args", EngineArgsRequest(names=names), Path(folder), lambda line: None)

    def command(self, job: TrainingJob, hardware: Hardware) -> EngineCommand:
        """Return the training program's command; of several devices it sees the first that is visible."""
        environment = {} if hardware.device_type != "cpu" else {**CPU_ENVIRONMENT}
        if hardware.device_type in ("cuda", "rocm") and hardware.device_count > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        return EngineCommand(module="tasks.programs.train", arguments=(str(job.attempt_dir),), environment=environment)

    def outcome(self, job: TrainingJob, ended: ProgramExit, hardware: Hardware, cgroup_oom_kills: int) -> Outcome:
        """Read ``outcome.json``; without one, tell a kill for memory from any other death by the evidence."""
        outcome = interrupted_outcome(job)
        if outcome.failure is None:
            return outcome
        if outcome.failure.error_type != "ProcessDied":
            return outcome.model_copy(update={"failure": outcome.failure.model_copy(update={"log_tail": ended.log_tail})})
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
        kills = f"; the memory cgroup counted {cgroup_oom_kills} kill(s)" if cgroup_oom_kills else ""
        message = f"the training process ended by {how} without an outcome{kills}"
        failure = Failure(phase=None, error_type="ProcessDied", message=message, log_tail=ended.log_tail)
        return outcome.model_copy(update={"status": "out_of_memory" if shortage else "failed", "shortage": shortage, "failure": failure})
