"""LoRA: adapters on frozen 16-bit weights, what a training state of them can be gone on with, and the merged model."""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tasks.errors import RefusedInput
from tasks.files import read_record
from tasks.records import MemoryLevers

LEVERS_FILE = "levers.json"
# the checkpoint's files, which are merged one after the other: small enough that saving never takes the most memory
NUM_FILES, SMALLEST_FILE_BYTES = 16, 2**24


def lora_config(levers: MemoryLevers, alpha: float) -> LoraConfig | None:
    """Return the configuration of adapters on all linear layers but the head; None if all weights are trained."""
    rank = levers.lora_rank
    return LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=rank, lora_alpha=alpha) if rank else None


def same_optimizer(state_dir: Path, levers: MemoryLevers) -> bool:
    """Return whether a training state holds the states of this attempt's kind of optimizer.

    Raises:
        RefusedInput: the state's weights are not those that the attempt trains; they would be left out without a word.
    """
    path = state_dir / LEVERS_FILE
    saved = read_record(path, MemoryLevers) if path.is_file() else levers.model_copy(update={"optimizer_8bit": False, "lora_rank": None})
    if saved.lora_rank != levers.lora_rank:
        holds, trains = (f"adapters of rank {rank}" if rank else "all weights" for rank in (saved.lora_rank, levers.lora_rank))
        remedy = "start it anew, or with the state's lora_rank"
        raise RefusedInput(f"the training state {state_dir} holds {holds}, the attempt trains {trains}: {remedy}")
    return saved.optimizer_8bit == levers.optimizer_8bit


def save_model(model: PreTrainedModel | PeftModel, out_dir: Path) -> None:
    """Save a model that loads without peft.

    Adapters are merged in fp32, for in 16 bits most of what they add to a weight would be rounded away; file by file, for
    the whole model in fp32 may not fit where it was trained in 16 bits.
    """
    if not isinstance(model, PeftModel):
        model.save_pretrained(out_dir)
        return
    base = model.get_base_model()
    frozen = {name.replace(".base_layer", ""): weight for name, weight in base.state_dict().items() if ".lora_" not in name}
    file_bytes = max(SMALLEST_FILE_BYTES, sum(weight.nbytes for weight in frozen.values()) // NUM_FILES)
    base.save_pretrained(out_dir, state_dict=frozen, max_shard_size=file_bytes)
    base.config.dtype = "float32"
    base.config.save_pretrained(out_dir)
    adapters = {f"{name}.weight": layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    for path in out_dir.glob("*.safetensors"):
        # a copy: the file is written over
        weights = {name: weight.to(torch.float32, copy=True) for name, weight in load_file(path).items()}
        for name in weights.keys() & adapters.keys():
            weights[name] += adapters[name].get_delta_weight("default").detach().cpu()
        save_file(weights, path, metadata={"format": "pt"})
