"""Raw facts of a machine, as its tools and torch report them; written as JSON, they are a recorded machine."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tasks.host_memory import HostMemory
from tasks.records import Record


class DeviceFacts(Record):
    """What torch says of one visible accelerator, or of the processor where there is none."""

    api: Literal["cuda", "xpu", "mps", "npu", "cpu"] = Field(description="torch module it is reached by; ROCm is reached by cuda")
    name: str
    capability: str | None = Field(default=None, description="'8.0' on CUDA, 'gfx942' on ROCm")
    memory_total_bytes: int
    memory_free_bytes: int
    has_bf16: bool | None = Field(default=None, description="the device's own flag, emulation not counted")
    has_fp16: bool | None = None
    matmul_seconds: dict[str, float] | None = Field(default=None, description="by format, measured where the name does not tell")


class CpuFacts(Record):
    """The processor, with its instruction set flags as the kernel spells them."""

    name: str
    architecture: str
    flags: tuple[str, ...]
    num_cpus: int = Field(description="that this process may use: affinity and CPU quota counted")
    onednn_bf16: bool | None = Field(default=None, description="whether torch gives bf16 products to oneDNN here; null: no oneDNN")
    onednn_fp16: bool | None = Field(default=None, description="the same for fp16")


class MachineFacts(Record):
    """All that detection reads from one machine; a recorded machine is this as JSON."""

    source: str = Field(description="where these facts come from")
    torch_version: str
    cuda_version: str | None = Field(default=None, description="of the torch build")
    hip_version: str | None = Field(default=None, description="of the torch build")
    torch_arches: tuple[str, ...] = Field(default=(), description="architectures that the torch build has kernels for")
    torch_claims_bf16: bool | None = Field(default=None, description="torch.cuda.is_bf16_supported(), which counts emulation")
    devices: tuple[DeviceFacts, ...] = ()
    visibility: dict[str, str] = Field(default_factory=dict, description="environment variables that hide devices")
    driver_version: str | None = None
    cpu: CpuFacts
    host: HostMemory
    notes: tuple[str, ...] = ()


class DetectRequest(Record):
    """Facts of this machine are wanted, and what they are judged to be."""

    facts_file: Path
    hardware_file: Path
