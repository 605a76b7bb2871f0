"""Prepare a dataset: train.parquet, eval.parquet and manifest.json.

Launch: ``python -m tasks.programs.prepare_dataset REQUEST.json`` (a DatasetRequest; ``result.json`` is written beside it), or
``python -m tasks.programs.prepare_dataset --params params/retrain.yaml --base-model DIR --out DIR``. The base model's tokenizer
shapes the prompts (chat template) and measures them. The held-out set keeps every distinct problem drawn for it, so that it
looks like the family; a training problem that asks a held-out question is left out. Two builds of one spec hold the same bytes.
"""

from dataclasses import replace

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tasks.errors import RefusedInput
from tasks.files import folder_aside, read_record, write_record
from tasks.params import DatasetParams, ReasoningGymParams
from tasks.programs import lifecycle
from tasks.programs.problems import EVAL_FILE, TRAIN_FILE, draw_sets, separate, write_problems
from tasks.specs import MANIFEST_FILE, BaseModelManifest, DatasetManifest, DatasetRequest, base_model_spec, dataset_spec


def build(request: DatasetRequest) -> None:
    """Prepare the dataset that is asked for into ``request.out_dir``."""
    dataset, tokenizer, limit = request.dataset, _load_tokenizer(request), request.dataset.max_prompt_length
    drawn = separate(draw_sets(dataset))
    sets, lengths = [], []
    for drawn_rows in (drawn.train, drawn.held_out):
        rows = [replace(row, prompt=render_prompt(row.question, dataset, tokenizer)) for row in drawn_rows]
        measured = [len(tokenizer(row.prompt)["input_ids"]) for row in rows]
        sets.append([row for row, length in zip(rows, measured, strict=True) if length <= limit])
        lengths += measured
    train, held_out = sets
    dropped = len(lengths) - len(train) - len(held_out)
    if dropped > dataset.max_dropped_share * len(lengths) or not all(sets):
        raise RefusedInput(
            f"{dropped} of {len(lengths)} prompts are longer than dataset.max_prompt_length = {limit} tokens (longest {max(lengths)}), "
            f"{len(train)} training and {len(held_out)} held-out ones are left; at most {dataset.max_dropped_share:.0%} may be dropped. "
            "Raise dataset.max_prompt_length, or dataset.max_dropped_share to train on the short ones"
        )
    manifest = DatasetManifest(
        spec=dataset_spec(dataset, request.base_model),
        num_train=len(train),
        num_eval=len(held_out),
        num_dropped=dropped,
        num_repeats=drawn.num_repeats,
        num_held_out_in_train=drawn.num_held_out_in_train,
        longest_prompt=max(length for length in lengths if length <= limit),
    )
    with folder_aside(request.out_dir) as folder:
        write_problems(folder / TRAIN_FILE, train)
        write_problems(folder / EVAL_FILE, held_out)
        write_record(folder / MANIFEST_FILE, manifest)
    print(f"progress: dataset in {request.out_dir}: {', '.join(f'{name} {count}' for name, count in manifest if name != 'spec')}")


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


FOLDERS = {"base_model_dir": "folder made by fetch_base_model from the same params file", "out_dir": "folder to make"}

if __name__ == "__main__":
    raise SystemExit(lifecycle.main(DatasetRequest, build, __doc__, **FOLDERS))
