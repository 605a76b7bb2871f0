"""The problems of a prepared dataset, read from and written to parquet with bytes that depend on nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = pa.schema([(name, pa.string()) for name in ("prompt", "question", "answer", "entry")])
TRAIN_FILE = "train.parquet"
EVAL_FILE = "eval.parquet"


@dataclass(frozen=True, slots=True)
class Row:
    """What a scorer may look at beside the completion. `entry` is the reasoning-gym entry as JSON, '{}' for other sources."""

    question: str
    answer: str
    entry: str


@dataclass(frozen=True, slots=True)
class Problem(Row):
    """One row of a dataset; `prompt` is the whole text the model is fed, chat template applied."""

    prompt: str


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write problems in one row group."""
    columns = [pa.array([getattr(problem, name) for problem in problems], pa.string()) for name in SCHEMA.names]
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    pq.write_table(table, path, row_group_size=max(1, len(problems)), compression="zstd", store_schema=False)


def read_problems(path: Path) -> list[Problem]:
    """Read the problems that `write_problems` wrote, in their order."""
    return [Problem(**row) for row in pq.read_table(path, columns=SCHEMA.names).to_pylist()]
