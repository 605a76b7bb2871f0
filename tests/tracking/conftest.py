"""One real sqlite store for all tests of tracking: creating it takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.params import Params
from tasks.records import (
    Attempt,
    FormatSupport,
    Hardware,
    MemoryLevers,
    Precision,
    PrecisionPlan,
    RuledOut,
    RunFolder,
    SourceVersion,
    Support,
    TrackedRun,
)
from tasks.tracking.runs import open_parent_run


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
        yield tmp_path_factory.mktemp("tracking") / "state"


@pytest.fixture(scope="session")
def hardware() -> Hardware:
    native = FormatSupport(level=Support.native, fact="has avx512_bf16")
    emulated = FormatSupport(level=Support.emulated, fact="no fp16 units")
    return Hardware(
        device_type="cpu",
        device_name="a CPU",
        device_count=1,
        memory_total_bytes=8 << 30,
        memory_free_bytes=4 << 30,
        host_memory_bytes=8 << 30,
        host_memory_fact="memory.max",
        bf16=native,
        fp16=emulated,
        torch_version="2.13.0",
        num_cpus=2,
    )


@pytest.fixture(scope="session")
def plan() -> PrecisionPlan:
    def attempt(number: int, mixed: str, checkpointing: bool) -> Attempt:
        return Attempt(
            number=number,
            label="baseline" if number == 1 else "retry",
            precision=Precision(mixed_precision=mixed, grad_scaler=mixed == "fp16"),
            levers=MemoryLevers(per_device_train_batch_size=8, gradient_accumulation_steps=4, gradient_checkpointing=checkpointing),
            engine="trl_local",
            rehearsal=mixed == "fp16",
            reason=f"{mixed} because of a fact",
        )

    ruled_out = (RuledOut(precision="fp8", reason="no units"),)
    return PrecisionPlan(
        attempts=(attempt(1, "bf16", False), attempt(2, "fp16", True)), reason="the plan's reason " * 600, ruled_out=ruled_out
    )


def run_folder(name: str, flow_run_id: str | None) -> RunFolder:
    source = SourceVersion(git_commit="abc123", dirty=True)
    return RunFolder(name=name, run_dir=Path("unused"), started_at="now", flow_run_id=flow_run_id, source=source)


@pytest.fixture
def parent(request: pytest.FixtureRequest, state_dir: Path, hardware: Hardware, plan: PrecisionPlan) -> TrackedRun:
    params = Params.model_validate(
        {"training": {"engine_args": {"note": "x" * 7000, "odd=key": [], "many": {str(number): number for number in range(120)}}}}
    )
    name = request.node.name
    return open_parent_run(run_folder(name, f"flow-{name}"), state_dir, params, hardware, plan)
