"""What training is expected to take at its peak, and what each lever does to it. Pure.

The quantity is the one that a budget limits and an outcome measures: see tasks/programs/device_memory.py.
"""

from pathlib import Path

from pydantic import Field

from tasks.records import DeviceType, LeverEffect, MemoryLevers, MemoryPrediction, Phase, Precision, Record


class PeakRequest(Record):
    """What the peak of one attempt depends on, beside the model."""

    device_type: DeviceType
    precision: Precision
    levers: MemoryLevers
    prompt_length: int = Field(ge=1, description="tokens of the longest prompt")
    completion_length: int = Field(ge=1, description="tokens")
    beta: float = Field(description="above 0 a reference model is held beside the policy")
    num_processes: int = Field(default=1, ge=1, description="above 1 DDP holds the gradients a second time, in buckets to be sent")


class PredictionRequest(Record):
    """What the program that predicts is asked."""

    base_model_dir: Path
    out_dir: Path
    peaks: dict[str, PeakRequest] = Field(description="by the name of the file that receives the prediction")


class TensorBytes(Record):
    """What a dry run counted."""

    phases: dict[Phase, dict[str, int]] = Field(description="bytes of tensors by category at the peak of each phase")
    cache_elements: int = Field(description="of the rollout's KV cache when its last token is sampled")


class ProcessBytes(Record):
    """What a training process was seen to take beside its tensors, on the device at hand."""

    import_bytes: int = Field(description="resident when the imports are done: no part of the peak, but of what a machine must have")
    runtime_bytes: int = Field(description="what a step of a tiny model leaves behind: compiled kernels, work spaces, thread arenas")


# measured on scratch models of 0.1 and 11 million parameters with torch 2.13; `make bench-memory` scores them on others
TRAINER_BYTES = 25 * 2**20
# what glibc's heap keeps goes with the KV cache, which grows token by token; why, and what else it goes with, is not known: on one
# CPU it kept a third less of the same setting than on another (model B in bf16, 16 x 2, checkpointing), so that none of it is certain
HEAP_BYTES_PER_CACHE_ELEMENT = 13.4
# how far a peak may lie below what is certain of the predicted, and above all of it, as shares. From docs/results/memory-cpu.md: 44 %
# above at most with glibc's heap (model B, LoRA), 9 % either way with the compact allocator. On devices nothing was measured: what
# torch's caching allocator keeps must find room in the share above
ERROR_SHARES = {"heap": (0.1, 0.5), "compact heap": (0.1, 0.15), "device": (0.3, 0.3)}


def expected_peak(counted: TensorBytes, process: ProcessBytes, request: PeakRequest) -> MemoryPrediction:
    """Return what a process is expected to take, from what its tensors take."""
    kind = "device" if request.device_type != "cpu" else "compact heap" if request.levers.compact_allocator else "heap"
    runtime = process.runtime_bytes + (0 if kind == "device" else TRAINER_BYTES)
    kept = round(counted.cache_elements * HEAP_BYTES_PER_CACHE_ELEMENT) if kind == "heap" else 0
    certain = {phase: sum(sizes.values()) + runtime for phase, sizes in counted.phases.items()}
    # before the first rollout the heap has kept nothing of it
    phases = {phase: size + (0 if phase == "load" else kept) for phase, size in certain.items()}
    phase = max(phases, key=phases.__getitem__)
    below, above = ERROR_SHARES[kind]
    return MemoryPrediction(
        peak_bytes=phases[phase],
        least_bytes=round(max(certain.values()) * (1 - below)),
        most_bytes=round(phases[phase] * (1 + above)),
        phase=phase,
        categories={**counted.phases[phase], "runtime": runtime, "allocator": phases[phase] - certain[phase]},
        phases=phases,
        import_bytes=process.import_bytes,
    )


def effects(before: MemoryPrediction, steps: list[tuple[str, str, MemoryPrediction]], *, chained: bool) -> tuple[LeverEffect, ...]:
    """Return what each (lever, change, prediction with it) does to the peak; in a chain, against the step before it."""
    found = []
    for lever, change, after in steps:
        sizes = {name: before.categories.get(name, 0) - after.categories.get(name, 0) for name in {**before.categories, **after.categories}}
        freed = {name: size for name, size in sizes.items() if size}
        found.append(LeverEffect(lever=lever, change=change, peak_bytes=after.peak_bytes, freed=freed))
        before = after if chained else before
    return tuple(found)
