"""Join the other processes of an attempt that trains on several (ranks); `tasks.programs.ranks` starts them."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tasks.rank_outcomes import ranks_dir
from tasks.records import DeviceType, TrainingJob

# how long a rank waits for the others: longer than any rollout or save that goes well
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def backend_of(device_type: DeviceType) -> str:
    """Return what carries tensors between ranks."""
    return "gloo" if device_type == "cpu" else "nccl"


def join_ranks(job: TrainingJob, num_processes: int, device_type: DeviceType) -> int:
    """Wait for all ranks, which meet at a file of the attempt's folder, and return this one's number.

    It must come before accelerate, which would meet them at a TCP port that another run may hold.
    """
    rank = int(os.environ["RANK"])
    if device_type != "cpu":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = dist.FileStore(str(ranks_dir(job.attempt_dir) / "rendezvous"), num_processes)
    dist.init_process_group(backend_of(device_type), store=store, rank=rank, world_size=num_processes, timeout=COLLECTIVE_TIMEOUT)
    return rank
