"""What the engine refuses and starts, and how real training processes that were killed, stopped or starved are told apart."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.attempt_files import read_steps
from tasks.engines.trl_local import COMPACT_ALLOCATOR, TrlLocal
from tasks.errors import RefusedInput
from tasks.files import read_record, write_record
from tasks.host_memory import limit_files
from tasks.levers import baseline_levers
from tasks.memory import MB
from tasks.next_attempt import next_attempt
from tasks.params import Params, parse_params
from tasks.places import PROJECT_DIR
from tasks.precision import plan_precision
from tasks.processes import ProgramExit, run_program
from tasks.records import Attempt, FinishedAttempt, Outcome, TrainingJob
from tests.machines import hardware_of
from tests.training_runs import CPU, Inputs, smoke_params, train

# what a training process meets at the scorer's third call in training, of four problems and then of 16 completions a step
SCORER = """
import os
import signal

import torch

HELD, CALLS = [], []


def score(completions, questions, answers):
    CALLS.append(len(completions))
    if CALLS.count({batch}) == {call} and len(completions) == {batch} and not os.path.exists({marker!r}):
        open({marker!r}, "w").close()
        {event}
    return [len(set(completion)) / 20 for completion in completions]
"""


def meeting(event: str, folder: Path, **training: object) -> Params:
    """Return params whose scorer does `event` once, in the third step."""
    scorer = folder / "scorer.py"
    scorer.write_text(SCORER.format(event=event, batch=16, call=3, marker=str(folder / "met")))
    tree = smoke_params(max_steps=6, save_steps=2, **training).model_dump(mode="json")
    return parse_params({**tree, "reward": {"scorer": f"{scorer}:score"}}, "meeting")


def job(params: Params, attempt_dir: Path, inputs: Inputs | None = None, machine: str = CPU, attempt: Attempt | None = None) -> TrainingJob:
    first = attempt or plan_precision(hardware_of(machine), params).attempts[0]
    return TrainingJob(
        attempt=first.model_copy(update={"levers": baseline_levers(params)}) if attempt is None else first,
        params=params.model_dump(mode="json"),
        dataset_dir=inputs.dataset_dir if inputs else Path(),
        base_model_dir=inputs.base_model_dir if inputs else Path(),
        attempt_dir=attempt_dir,
    )


@pytest.fixture
def inputs(scratch_model_dir: Path, byte_dataset_dir: Path) -> Inputs:
    return Inputs(scratch_model_dir, byte_dataset_dir)


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.endswith("ALLOC_CONF") or name.startswith("MALLOC_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        ("a100_80gb_pcie", {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}),
        ("mi300x", {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}),
        ("arc_b580", {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}),
        ("ascend_910b3", {"PYTORCH_NPU_ALLOC_CONF"}),
        ("cpu_epyc_9r14", {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}),
    ],
)
def test_the_compact_allocator_is_set_by_the_devices_own_variables(
    machine: str, names: set[str], plain_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on, off = (Params.model_validate({"training": {"compact_allocator": value}}) for value in (True, False))
    hardware = hardware_of(machine)
    TrlLocal().check(hardware, on)
    plain = TrlLocal().command(job(off, tmp_path, machine=machine), hardware)
    compact = TrlLocal().command(job(on, tmp_path, machine=machine), hardware)
    assert compact.environment.keys() - plain.environment.keys() == names
    assert {compact.environment[name] for name in names} in ({"expandable_segments:True"}, {"65536"})
    assert (plain.notes, compact.notes) == ((), ())
    # a person's own setting is left alone, and said
    own = sorted(names)[-1]
    plain_environment.setenv(own, "theirs:1")
    kept = TrlLocal().command(job(on, tmp_path, machine=machine), hardware)
    assert kept.environment == plain.environment
    assert kept.notes == (f"the allocator stays as the environment sets it: {own}=theirs:1",)


@pytest.mark.parametrize("where", [{"training": {"compact_allocator": True}}, {"memory": {"retries": [{"compact_allocator": True}]}}])
def test_a_compact_allocator_is_refused_where_none_is_known(where: dict[str, object]) -> None:
    with pytest.raises(RefusedInput, match="no setting of the allocator is known for mps on this system; set it to false"):
        TrlLocal().check(hardware_of("apple_m4_max"), Params.model_validate(where))


def test_the_heap_of_another_c_library_has_no_compact_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrlLocal().has_compact_allocator(hardware_of(CPU)) and not TrlLocal().has_compact_allocator(hardware_of("apple_m4_max"))
    monkeypatch.setitem(COMPACT_ALLOCATOR, "cpu", {})
    assert not TrlLocal().has_compact_allocator(hardware_of(CPU))


def test_what_depends_on_the_micro_batch_is_refused_with_the_reason() -> None:
    """`bnpo` and its like: a retry's smaller micro-batch would train with another loss."""
    hardware = hardware_of(CPU)
    for value in ("bnpo", "dapo"):
        with pytest.raises(RefusedInput, match=r"training\.loss_type .only types whose loss does not depend on the micro-batch"):
            TrlLocal().check(hardware, Params.model_validate({"training": {"engine_args": {"loss_type": value}}}))
    with pytest.raises(RefusedInput, match=r"training\.loss_type"):
        parse_params({"training": {"loss_type": "bnpo"}}, "bnpo")
    with pytest.raises(RefusedInput, match="top_entropy_quantile: TRL takes it over one micro-batch"):
        TrlLocal().check(hardware, Params.model_validate({"training": {"engine_args": {"top_entropy_quantile": 0.2}}}))


def test_a_retry_that_divides_nothing_is_named_as_the_remedy_and_taken() -> None:
    tree = {"training": {"engine_args": {"top_entropy_quantile": 0.2}}}
    with pytest.raises(RefusedInput, match=r"set 'memory\.retries=\[\{micro_batch_divisor: 1\}\]'"):
        TrlLocal().check(hardware_of(CPU), Params.model_validate(tree))
    TrlLocal().check(hardware_of(CPU), parse_params({**tree, "memory": {"retries": [{"micro_batch_divisor": 1}]}}, "remedied"))


def test_each_rank_takes_a_device_of_its_own(tmp_path: Path) -> None:
    params = Params.model_validate({"training": {"strategy": "ddp", "num_processes": 4}})
    for machine in ("rtx_2080_ti_x4", CPU):
        hardware = hardware_of(machine)
        TrlLocal().check(hardware, params)
        command = TrlLocal().command(job(params, tmp_path, machine=machine), hardware)
        assert command.module == "tasks.programs.ranks" and "CUDA_VISIBLE_DEVICES" not in command.environment
    with pytest.raises(RefusedInput, match=r"num_processes is 4, but 1 x .* is there, and each process takes one; set it to 1 at most"):
        TrlLocal().check(hardware_of("a100_80gb_pcie"), params)
    with pytest.raises(RefusedInput, match="ddp runs on cpu, cuda and rocm, not on mps"):
        TrlLocal().check(hardware_of("apple_m4_max"), params)
    for name in ("ddp_backend", "ddp_timeout"):
        with pytest.raises(RefusedInput, match=name):
            TrlLocal().check(hardware_of(CPU), Params.model_validate({"training": {"engine_args": {name: 1}}}))


def test_a_kill_is_a_shortage_of_the_host_only_by_evidence(inputs: Inputs, tmp_path: Path) -> None:
    params = meeting("print('CUDA out of memory', flush=True); os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    attempt_dir, machine = tmp_path / "attempt", hardware_of(CPU)
    found = train(params, "bf16", inputs, attempt_dir)
    assert (found.status, found.shortage, found.steps_done) == ("failed", None, 2)
    assert found.failure is not None and "ended by signal 9 without an outcome" in found.failure.message
    assert "CUDA out of memory" in found.failure.log_tail
    written = read_record(attempt_dir / "attempt.json", TrainingJob)
    with_evidence = TrlLocal().outcome(written, ProgramExit(-9, False, found.failure.log_tail, 700 * MB), machine, 1)
    assert (with_evidence.status, with_evidence.shortage) == ("out_of_memory", "host")
    assert with_evidence.last_state_dir == attempt_dir / "states" / "checkpoint-2"
    # so that a smaller rollout can answer it
    assert with_evidence.failure is not None and with_evidence.failure.phase == found.failure.phase == "rollout"
    for words in ("the memory cgroup counted 1 kill(s)", "700 MB resident at most", "the host has"):
        assert words in with_evidence.failure.message
    # a stop before the program could say so itself
    for code in (-15, 143):
        stopped = TrlLocal().outcome(written, ProgramExit(code, False, "", 0), machine, 0)
        assert stopped.status == "cancelled" and stopped.failure is not None and stopped.failure.error_type == "Preempted"


def test_a_sigterm_that_nobody_here_sent_goes_on_from_the_last_state_and_ends_with_the_same_steps(inputs: Inputs, tmp_path: Path) -> None:
    params, hardware = meeting("os.kill(os.getpid(), signal.SIGTERM)", tmp_path), hardware_of(CPU)
    plan, finished = plan_precision(hardware, params), ()
    while attempt := next_attempt(plan, finished, params):
        work = job(params, tmp_path / attempt.name, inputs, attempt=attempt)
        write_record(work.attempt_dir / "attempt.json", work)
        command = TrlLocal().command(work, hardware)
        ended = run_program(command.module, command.arguments, work.attempt_dir / "train.log", environment=command.environment)
        outcome = TrlLocal().outcome(work, ended, hardware, 0)
        finished = (*finished, FinishedAttempt(attempt=attempt, outcome=outcome, attempt_dir=work.attempt_dir))
    first, second = finished
    assert (first.outcome.status, first.outcome.shortage, first.outcome.steps_done) == ("cancelled", None, 2)
    assert first.outcome.failure is not None and "ended the training process by SIGTERM" in first.outcome.failure.message
    assert second.attempt.name == f"{first.attempt.name}-resumed-1"
    assert (second.outcome.status, second.outcome.first_step, second.outcome.steps_done) == ("succeeded", 2, 6)
    assert [step["step"] for step in read_steps(second.attempt_dir)] == [3, 4, 5, 6]


# in a process of its own inside the limited cgroup, as a flow inside a container is
IN_CGROUP = """
import os, sys, types
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from tasks.files import read_record, write_record
from tasks.records import TrainingJob
from tasks.training import _run_child
from tests.machines import hardware_of
job = read_record(Path(sys.argv[2]), TrainingJob)
hardware = hardware_of("cpu_epyc_9r14")
log = types.SimpleNamespace(send=lambda: None)
write_record(Path(sys.argv[3]), _run_child(job, hardware, log, print))
"""


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """A memory cgroup of 1,500 MB, v1 or v2, whichever this machine lets us make; removed again whatever happens."""
    for parent in (file.parent for file in reversed(limit_files("memory"))):
        folder = parent / f"halfstep-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            limit = next((folder / name for name in ("memory.limit_in_bytes", "memory.max") if (folder / name).exists()), None)
            if limit:
                limit.write_text(str(1500 * MB))
                yield folder
                return
        finally:
            deadline = time.monotonic() + 20
            while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
                for line in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(line), 9)
                time.sleep(0.1)
            folder.rmdir()
    pytest.skip("no memory cgroup can be made here: neither v1 nor v2 is writable")


def test_a_kill_by_the_kernel_in_a_limited_cgroup_is_a_shortage_of_the_host(limited_cgroup: Path, inputs: Inputs, tmp_path: Path) -> None:
    # numbers, since a page of zeros takes no memory until it is written
    work = job(meeting("HELD.extend(torch.rand(2**24) for _ in range(64))", tmp_path), tmp_path / "attempt", inputs)
    write_record(work.attempt_dir / "attempt.json", work)
    arguments = [str(limited_cgroup), str(work.attempt_dir / "attempt.json"), str(tmp_path / "outcome.json")]
    done = subprocess.run(
        [sys.executable, "-c", IN_CGROUP, *arguments], cwd=PROJECT_DIR, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = read_record(tmp_path / "outcome.json", Outcome)
    assert (outcome.status, outcome.shortage) == ("out_of_memory", "host")
    assert outcome.failure is not None and "the memory cgroup counted 1 kill(s)" in outcome.failure.message
    assert outcome.last_state_dir == work.attempt_dir / "states" / "checkpoint-2"


def test_a_budget_above_the_hard_limit_on_a_process_is_refused_before_any_work() -> None:
    told = "memory.budget_mb asks for 9,000 MB, but this process may have a data segment of 8,000 MB at most (ulimit -Hd); lower it"
    check = (
        "from tasks.engines.trl_local import TrlLocal\nfrom tasks.params import Params\nfrom tests.machines import hardware_of\n"
        f"TrlLocal().check(hardware_of({CPU!r}), Params.model_validate({{'memory': {{'budget_mb': int(input())}}}}))"
    )
    command = ["bash", "-c", 'ulimit -d 8192000 && exec "$0" -c "$1"', sys.executable, check]
    for budget, refused in ((9000, True), (7000, False)):
        done = subprocess.run(command, input=str(budget), cwd=PROJECT_DIR, capture_output=True, text=True, check=False)
        assert (told in done.stderr) == refused and bool(done.returncode) == refused, done.stderr


def test_a_budget_that_meets_the_hard_limit_with_the_imports_is_held_at_that_limit() -> None:
    hold = "from tasks.programs.device_memory import LinuxCpuMemory\nmemory = LinuxCpuMemory()\nmemory.set_budget(7990 * 2**20)\n"
    hold += "print(memory.available_bytes() < 7990 * 2**20)"
    command = ["bash", "-c", 'ulimit -d 8192000 && exec "$0" -c "$1"', sys.executable, hold]
    done = subprocess.run(command, cwd=PROJECT_DIR, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr[-2000:]
