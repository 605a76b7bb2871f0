"""TRL's GRPO on one or several devices of this machine, as ``python -m tasks.programs.train`` or ``tasks.programs.ranks``."""

import os
import platform
import resource
import signal
import tempfile
from pathlib import Path

from tasks.engines.base import EngineArgsRequest, EngineCommand
from tasks.errors import RefusedInput
from tasks.memory import MB, Evidence, classify_shortage, last_words
from tasks.params import Params, TrainingParams
from tasks.processes import ProgramExit
from tasks.program_request import ask_program
from tasks.records import DeviceType, Failure, Hardware, Outcome, TrainingJob
from tasks.run_folder import interrupted_outcome

# what the training program sets itself on trl.GRPOConfig, by what decides it; most are fields of ours of the same name
OWNED_ARGUMENTS: dict[str, str] = {
    **{name: f"training.{name}" for name in TrainingParams.model_fields},
    **dict.fromkeys(("bf16", "fp16"), "precision.mode"),
    **dict.fromkeys(("use_cpu", "dataloader_pin_memory"), "the detected hardware"),
    **dict.fromkeys(("gradient_checkpointing_kwargs", "logging_steps", "logging_nan_inf_filter"), "the training program"),
    "disable_tqdm": "the training program",
    **dict.fromkeys(("ddp_backend", "ddp_find_unused_parameters"), "training.strategy"),
    "optim": "training.optimizer_8bit",
    "cast_lm_head_to_fp32": "precision.lm_head_fp32",
    "save_strategy": "training.save_steps",
    "output_dir": "the run folder",
    "report_to": "the flow, which logs to MLflow",
    "loss_type": "training.loss_type (only types whose loss does not depend on the micro-batch, which a retry divides)",
}
# another way to generate, code from outside, or other states than a resume needs: not what the plan says will run
_ROLLOUT = {"use_vllm", "use_transformers_continuous_batching", "num_iterations", "steps_per_generation", "generation_batch_size"}
_RANKS = {"ddp_timeout", "ddp_static_graph", "local_rank", "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "accelerator_config"}
REFUSED_ARGUMENTS = _ROLLOUT | _RANKS | {"trust_remote_code", "push_to_hub", "auto_find_batch_size", "save_only_model", "logging_strategy"}
# what TRL works out from one micro-batch, whatever the loss type
MICRO_BATCH_ARGUMENTS = {"top_entropy_quantile", "entropy_coef", "use_adaptive_entropy"}
# as subprocess and as a shell say it
SIGTERM_CODES = (-signal.SIGTERM, 128 + signal.SIGTERM)
SIGKILL_CODES = (-signal.SIGKILL, 128 + signal.SIGKILL)
# the compact allocator by device: segments that grow in place, or a heap that gives freed blocks back. torch 2.9 reads CUDA's
# from the old name alone, 2.11 and 2.13 from the new one first
TORCH_ALLOCATOR = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
GLIBC_ALLOCATOR = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
COMPACT_ALLOCATOR: dict[DeviceType, dict[str, str]] = {
    **dict.fromkeys(("cuda", "rocm", "xpu"), TORCH_ALLOCATOR),
    "npu": {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"},
    "cpu": GLIBC_ALLOCATOR if platform.libc_ver()[0] == "glibc" else {},
}


class TrlLocal:
    """One process on one device, or one on each of several devices of this machine (DDP); several machines are left to another engine."""

    def check(self, hardware: Hardware, params: Params) -> None:
        """Refuse engine_args that overlap a field of ours or change what the plan says, and more processes than devices."""
        _check_ranks(hardware, params.training)
        hard, budget = resource.getrlimit(resource.RLIMIT_DATA)[1], params.memory.budget_mb
        if hardware.device_type == "cpu" and budget and hard != resource.RLIM_INFINITY and budget * MB > hard:
            found = f"this process may have a data segment of {hard / MB:,.0f} MB at most (ulimit -Hd)"
            raise RefusedInput(f"memory.budget_mb asks for {budget:,.0f} MB, but {found}; lower it, or raise that limit")
        names = tuple(params.training.engine_args)
        for name in names:
            if name in OWNED_ARGUMENTS:
                owner = OWNED_ARGUMENTS[name]
                there = "set it there and " if "." in owner else ""
                raise RefusedInput(f"training.engine_args.{name}: decided by {owner}; {there}remove it here")
            if name in REFUSED_ARGUMENTS:
                raise RefusedInput(f"training.engine_args.{name}: engine trl_local does not run this; remove it")
            size = params.training.per_device_train_batch_size
            if name in MICRO_BATCH_ARGUMENTS and any(retry.divisor(size) > 1 for retry in params.memory.retries):
                why = "TRL takes it over one micro-batch, so a retry with a smaller one would train with another loss"
                remedy = "remove it, or set 'memory.retries=[{micro_batch_divisor: 1}]'"
                raise RefusedInput(f"training.engine_args.{name}: {why}; {remedy}")
        compact = [params.training.compact_allocator, *(retry.compact_allocator for retry in params.memory.retries)]
        if any(compact) and not self.has_compact_allocator(hardware):
            found = f"no setting of the allocator is known for {hardware.device_type} on this system"
            raise RefusedInput(f"compact_allocator (training or memory.retries) is true, but {found}; set it to false")
        if names:
            with tempfile.TemporaryDirectory() as folder:
                ask_program("tasks.programs.check_engine_args", EngineArgsRequest(names=names), Path(folder), lambda line: None)

    def has_compact_allocator(self, hardware: Hardware) -> bool:
        """Return whether a setting of the allocator is known for this device and C library."""
        return bool(COMPACT_ALLOCATOR.get(hardware.device_type))

    def command(self, job: TrainingJob, hardware: Hardware) -> EngineCommand:
        """Return the training program's command; a single process sees the first of the visible devices, each rank one of them."""
        environment = {}
        several = int(job.params["training"]["num_processes"]) > 1
        if not several and hardware.device_type in ("cuda", "rocm") and hardware.device_count > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
        notes = []
        if job.attempt.levers.compact_allocator:
            compact = COMPACT_ALLOCATOR[hardware.device_type]
            theirs = [f"{name}={os.environ[name]}" for name in (*compact, "PYTORCH_HIP_ALLOC_CONF") if name in os.environ]
            notes = [f"the allocator stays as the environment sets it: {', '.join(theirs)}"] if theirs else []
            environment |= {} if theirs else compact
        arguments = (str(job.attempt_dir),)
        module = "tasks.programs.ranks" if several else "tasks.programs.train"
        return EngineCommand(module=module, arguments=arguments, environment=environment, notes=tuple(notes))

    def outcome(self, job: TrainingJob, ended: ProgramExit, hardware: Hardware, cgroup_oom_kills: int) -> Outcome:
        """Read ``outcome.json``; without one, tell a kill for memory, and any stop that this run did not ask for, by the evidence."""
        outcome = interrupted_outcome(job)
        died = outcome.failure is not None and outcome.failure.error_type == "ProcessDied"
        if outcome.status == "cancelled" and (not died or ended.returncode in SIGTERM_CODES):
            why = "something outside this run ended the training process by SIGTERM"
            outcome = outcome.model_copy(update={"failure": Failure(phase=None, error_type="Preempted", message=why)})
        elif died:
            outcome = _from_evidence(outcome, ended, hardware, cgroup_oom_kills, int(job.params["training"]["num_processes"]))
        if outcome.failure is None:
            return outcome
        host = f"; the host has {hardware.host_memory_bytes / MB:,.0f} MB ({hardware.host_memory_fact})" * (outcome.shortage == "host")
        failure = outcome.failure.model_copy(update={"log_tail": ended.log_tail, "message": outcome.failure.message + host})
        return outcome.model_copy(update={"failure": failure})


def _check_ranks(hardware: Hardware, training: TrainingParams) -> None:
    asked = f"training.num_processes is {training.num_processes}"
    if training.num_processes > 1 and hardware.device_type not in ("cpu", "cuda", "rocm"):
        raise RefusedInput(
            f"{asked}, but ddp runs on cpu, cuda and rocm, not on {hardware.device_type}; set strategy=single num_processes=1"
        )
    if training.num_processes > hardware.device_count and hardware.device_type != "cpu":
        found = f"{hardware.device_count} x {hardware.device_name} is there, and each process takes one"
        raise RefusedInput(f"{asked}, but {found}; set it to {hardware.device_count} at most (1 with strategy=single)")


def _from_evidence(outcome: Outcome, ended: ProgramExit, hardware: Hardware, cgroup_oom_kills: int, num_processes: int) -> Outcome:
    killed = ended.returncode in SIGKILL_CODES
    # ranks take about the same, and the largest is known
    peak_rss_bytes = num_processes * ended.peak_rss_bytes
    rank, phase = (outcome.failure.rank, outcome.failure.phase) if outcome.failure else (None, None)
    evidence = Evidence(
        device_type=hardware.device_type,
        message="" if killed else last_words(ended.log_tail),  # what a log says last is not why its process was killed
        killed_by_kernel=killed,
        cgroup_oom_kills=cgroup_oom_kills,
        peak_rss_bytes=peak_rss_bytes,
        host_memory_bytes=hardware.host_memory_bytes,
    )
    shortage = classify_shortage(evidence)
    how = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
    kills = f"; the memory cgroup counted {cgroup_oom_kills} kill(s)" if cgroup_oom_kills else ""
    resident = f"{ended.peak_rss_bytes / MB:,.0f} MB resident at most"
    message = f"the training process, {resident}, ended by {how} without an outcome{kills}"
    if outcome.failure and rank is not None:
        message = f"{outcome.failure.message}, {resident} in one process{kills}"
    failure = Failure(phase=phase, error_type="ProcessDied", message=message, rank=rank)
    return outcome.model_copy(update={"status": "out_of_memory" if shortage else "failed", "shortage": shortage, "failure": failure})
