"""Prepare a dataset: train.parquet, eval.parquet and manifest.json.

Launch: ``python -m tasks.programs.prepare_dataset REQUEST.json`` (a DatasetRequest; ``result.json`` is written beside it), or
``python -m tasks.programs.prepare_dataset --params params/retrain.yaml --base-model DIR --out DIR``. The base model's tokenizer
shapes the prompts (chat template) and measures them. The held-out set keeps every distinct problem drawn for it, so that it
looks like the family; a training problem that asks a held-out question is left out. Two builds of one spec hold the same bytes.
"""

import argparse
import os
import sys
from pathlib import Path

# set before transformers is imported: nothing is ever asked of a model hub
os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tasks.errors import RefusedInput
from tasks.files import folder_aside, read_record, write_record
from tasks.params import DatasetParams, ReasoningGymParams, load_params
from tasks.programs import lifecycle
from tasks.programs.answering import answer_request, run_reported
from tasks.programs.problem_sources import Drawn, draw_sets, separate
from tasks.programs.problems import EVAL_FILE, TRAIN_FILE, Problem, Row, write_problems
from tasks.specs import MANIFEST_FILE, BaseModelManifest, DatasetManifest, DatasetRequest, base_model_spec, dataset_spec


def build(request: DatasetRequest) -> None:
    """Prepare the dataset that is asked for into ``request.out_dir``."""
    tokenizer = _load_tokenizer(request)
    drawn = separate(draw_sets(request.dataset))
    train, eval_set, manifest = _fitting(request, drawn, tokenizer)
    request.out_dir.parent.mkdir(parents=True, exist_ok=True)
    with folder_aside(request.out_dir) as folder:
        write_problems(folder / TRAIN_FILE, train)
        write_problems(folder / EVAL_FILE, eval_set)
        write_record(folder / MANIFEST_FILE, manifest)
    print(
        f"progress: dataset in {request.out_dir}: {manifest.num_train} training and {manifest.num_eval} held-out problems; left out: "
        f"{manifest.num_repeats} repeats, {manifest.num_held_out_in_train} training problems that are held out, "
        f"{manifest.num_dropped} prompts above {request.dataset.max_prompt_length} tokens"
    )


def render_prompt(question: str, dataset: DatasetParams, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the whole text the model is fed for a question."""
    if not isinstance(dataset, ReasoningGymParams):
        return question
    if not tokenizer.chat_template:
        return "\n".join(part for part in (dataset.instruction, question) if part) + dataset.answer_prefix
    system = [{"role": "system", "content": dataset.instruction}] if dataset.instruction else []
    messages = [*system, {"role": "user", "content": question}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text + dataset.answer_prefix


def _load_tokenizer(request: DatasetRequest) -> PreTrainedTokenizerBase:
    path = request.base_model_dir / MANIFEST_FILE
    if not path.is_file():
        raise RefusedInput(f"{request.base_model_dir} is no base model made by fetch_base_model: it has no {MANIFEST_FILE}")
    found, wanted = read_record(path, BaseModelManifest).spec, base_model_spec(request.base_model)
    if found != wanted:
        raise RefusedInput(f"{request.base_model_dir} holds base model {found}, asked for {wanted}; build it with fetch_base_model")
    return AutoTokenizer.from_pretrained(request.base_model_dir, local_files_only=True)


def _fitting(
    request: DatasetRequest, drawn: Drawn, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Problem], list[Problem], DatasetManifest]:
    dataset, limit = request.dataset, request.dataset.max_prompt_length
    sets, lengths = [], []
    for rows in (drawn.train, drawn.held_out):
        problems = [_problem(row, dataset, tokenizer) for row in rows]
        measured = [len(tokenizer(problem.prompt)["input_ids"]) for problem in problems]
        sets.append([problem for problem, length in zip(problems, measured, strict=True) if length <= limit])
        lengths.extend(measured)
    dropped = sum(length > limit for length in lengths)
    if dropped > dataset.max_dropped_share * len(lengths) or not all(sets):
        raise RefusedInput(
            f"{dropped} of {len(lengths)} prompts are longer than dataset.max_prompt_length = {limit} tokens (longest {max(lengths)}), "
            f"{len(sets[0])} training and {len(sets[1])} held-out ones are left; at most {dataset.max_dropped_share:.0%} may be dropped. "
            "Raise dataset.max_prompt_length, or dataset.max_dropped_share to train on the short ones"
        )
    manifest = DatasetManifest(
        spec=dataset_spec(dataset, request.base_model),
        num_train=len(sets[0]),
        num_eval=len(sets[1]),
        num_dropped=dropped,
        num_repeats=drawn.num_repeats,
        num_held_out_in_train=drawn.num_held_out_in_train,
        longest_prompt=max(length for length in lengths if length <= limit),
    )
    return sets[0], sets[1], manifest


def _problem(row: Row, dataset: DatasetParams, tokenizer: PreTrainedTokenizerBase) -> Problem:
    return Problem(row.question, row.answer, row.entry, prompt=render_prompt(row.question, dataset, tokenizer))


def main() -> int:
    """Prepare what the arguments ask for."""
    lifecycle.start()
    parser = argparse.ArgumentParser(prog="python -m tasks.programs.prepare_dataset", description=__doc__.partition("\n")[0])
    parser.add_argument("request", nargs="?", type=Path, help="a DatasetRequest as JSON")
    parser.add_argument("--params", type=Path, help="params file whose dataset section is prepared")
    parser.add_argument("--base-model", type=Path, help="folder made by fetch_base_model from the same params file")
    parser.add_argument("--out", type=Path, help="folder to make")
    arguments = parser.parse_args()
    if arguments.request:
        return answer_request(arguments.request, DatasetRequest, build)
    if not (arguments.params and arguments.base_model and arguments.out):
        parser.error("give either REQUEST.json or --params, --base-model and --out")
    return run_reported(lambda: _build_from_params(arguments.params, arguments.base_model, arguments.out))


def _build_from_params(path: Path, base_model_dir: Path, out_dir: Path) -> None:
    params = load_params(path)
    build(DatasetRequest(dataset=params.dataset, base_model=params.base_model, base_model_dir=base_model_dir, out_dir=out_dir))


if __name__ == "__main__":
    sys.exit(main())
