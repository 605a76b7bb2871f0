"""What the evaluation program is asked, and what it answers."""

from pathlib import Path

from pydantic import Field

from tasks.params import DatasetParams, RewardParams
from tasks.records import Precision, Record

ANSWERS_FILE = "answers.json"


class EvaluationRequest(Record):
    """One model's answers to every held-out problem are wanted."""

    model_dir: Path
    dataset_dir: Path
    dataset: DatasetParams
    reward: RewardParams
    precision: Precision
    batch_size: int = Field(ge=1, description="problems answered at once")
    max_new_tokens: int = Field(ge=1)


class ScoredAnswer(Record):
    """A greedy completion of one problem."""

    question: str
    expected: str
    completion: str
    score: float
    num_tokens: int = Field(description="up to and with the end token")
    ended: bool = Field(description="the model ended it; otherwise it was cut at max_new_tokens")


class ModelAnswers(Record):
    """All answers of one model, in the order of eval.parquet."""

    answers: tuple[ScoredAnswer, ...] = Field(min_length=1)
    weights_dtype: str = Field(description="of the copy that generated")
    observed_dtypes: tuple[str, ...] = Field(description="outputs of linear layers, as seen")
    num_tokens: int = Field(description="prompt and completion tokens, padding excluded")
