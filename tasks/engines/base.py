"""What can run a training attempt: a protocol, one small file an engine."""

from typing import Protocol

from pydantic import Field

from tasks.params import Params
from tasks.processes import ProgramExit
from tasks.records import Hardware, Outcome, Record, TrainingJob


class EngineCommand(Record):
    """How an engine's program is started."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    notes: tuple[str, ...] = Field(default=(), description="what a person must know of it")


class EngineArgsRequest(Record):
    """Names of ``training.engine_args`` to be checked by the library that owns them."""

    names: tuple[str, ...]


class Engine(Protocol):
    """Runs attempts. It refuses what it cannot express; it never approximates."""

    def check(self, hardware: Hardware, params: Params) -> None:
        """Raise RefusedInput, with the remedy, if these params cannot be done on this hardware."""

    def has_compact_allocator(self, hardware: Hardware) -> bool:
        """Return whether the lever compact_allocator can be pulled on this hardware."""

    def command(self, job: TrainingJob, hardware: Hardware) -> EngineCommand:
        """Return the command that runs `job`."""

    def outcome(self, job: TrainingJob, ended: ProgramExit, hardware: Hardware, cgroup_oom_kills: int) -> Outcome:
        """Return what came of it: the program's own outcome, or one made from the evidence it left."""
