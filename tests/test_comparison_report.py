"""The report of a comparison: every figure it has, nothing it loads, and no word of the user's that turns into markup."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tasks.comparison import plan_comparison, run_order
from tasks.comparison_measures import ComparisonRecord, Measured, ServedFormat
from tasks.comparison_records import MeasuredRun
from tasks.comparison_report import figures, page, plain, report_text, shown, with_images
from tasks.evaluation import accuracy
from tasks.measures import run_measures
from tasks.params import Params
from tasks.program_request import ScoredAnswer
from tasks.records import ArtifactVersion, DatasetVersion, FinishedAttempt, Outcome, SourceVersion
from tasks.verdict import judge
from tests.machines import hardware_of

OUTCOME = Outcome(status="succeeded", peak_memory_bytes=2**30, steps_done=104, total_steps=104)
SHORT = Outcome(status="out_of_memory", steps_done=3, total_steps=104)
PARAMS = Params.model_validate(
    {
        "comparison": {"variants": {"bf16": {"precision.mode": "bf16"}, "fp16": {"precision.mode": "fp16"}}, "seeds": [1, 2]},
        "training": {"max_steps": 104},
    }
)
HOSTILE = "<script>alert(1)</script> ![x](http://example.org/x.png) | [y](javascript:1)"


class Tags(HTMLParser):
    """Names of the elements of a page, with what they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "data", "action", "poster")]


def steps(slowness: float) -> list[dict[str, float]]:
    names = {"loss": 0.0, "reward": 0.4, "entropy": 1.5, "grad_norm": 0.7, "peak_memory_mb": 900.0, "loss_scale": 2.0**16}
    times = {"step_time_ms": 100.0 * slowness, "forward_backward_time_ms": 40.0, "rollout_time_ms": 50.0, "tokens_per_second": 800.0}
    return [{"step": float(number), **names, **times, "reward": 0.4 + number % 7 / 50} for number in range(1, 105)]


@pytest.fixture
def record(tmp_path: Path) -> ComparisonRecord:
    plan = plan_comparison(hardware_of("h100_x8"), PARAMS)
    answers = tuple(ScoredAnswer(question="q", expected="7", completion="7", score=float(index % 2)) for index in range(20))
    share = accuracy(answers, 1.0)
    ended, runs = [], []
    for attempt, (variant, seed) in zip(plan.attempts, run_order(PARAMS.comparison), strict=True):
        failed = (variant, seed) == ("fp16", 2)
        folder = tmp_path / attempt.name
        folder.mkdir()
        written = steps(1.0 if variant == "bf16" else 1.5 + seed / 100)[: 3 if failed else None]
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": step["step"], "time": 0, "metrics": step}) + "\n" for step in written)
        )
        ended.append(FinishedAttempt(attempt=attempt, outcome=SHORT if failed else OUTCOME, attempt_dir=folder))
        measures = None if failed else run_measures(written, 4, OUTCOME, share)
        what = {"what_happened": f"ran out of memory: {HOSTILE}"} if failed else {}
        status = ended[-1].outcome.status
        runs.append(MeasuredRun(variant=variant, seed=seed, order=attempt.number, status=status, measures=measures, **what))
    served = (
        ServedFormat(precision="bf16", accuracy=share, decode_time_ms=12.34),
        ServedFormat(precision="fp16", what_happened="refused: no"),
    )
    version = ArtifactVersion(path=tmp_path, dvc_hash="0.dir", size_bytes=1, location="store:x")
    return ComparisonRecord(
        run_name="20261202-a-run",
        started_at="2026-12-02",
        hardware=hardware_of("h100_x8"),
        plan=plan,
        params=PARAMS.model_dump(mode="json"),
        dataset=DatasetVersion(version=version, num_train=24, num_eval=20, num_dropped=0),
        base_model=version,
        attempts=tuple(ended),
        measured=Measured(runs=tuple(runs), served="bf16-seed1", serving=served, verdict=judge(runs)),
        wall_seconds=1234.0,
        training_seconds=1000.0,
        versions={"torch": "2.13.0"},
        source=SourceVersion(git_commit="abc", dirty=False),
        tracking_uri="none",
        tracking_run_id="0",
    )


def test_the_report_holds_verdict_measures_failures_serving_and_method(record: ComparisonRecord) -> None:
    text = report_text(record, figures(record))
    verdict = record.measured.verdict
    for words in (
        *map(plain, verdict.sentences),
        *(plain(finding.sentence) for finding in verdict.findings),
        "| runs that succeeded | 2 of 2 | 1 of 2 |",
        "| ms a step, median | 100 | 151 |",
        "| 4 | bf16 | 2 | succeeded |",
        "| 3 | fp16 | 2 | out\\_of\\_memory |",
        "12.34",
        "refused: no",
        "H100",
        "torch 2.13.0",
        "about 0 by construction",
        "Time of the whole comparison: 1,234 s, 1.23 times; the training processes took 1,000 s.",
    ):
        assert words in text, words


def test_the_peaks_of_several_devices_are_rows_of_their_own(record: ComparisonRecord) -> None:
    assert "device" not in report_text(record, ()).split("## Runs")[0]
    spread = [
        run.model_copy(update={"measures": run.measures.model_copy(update={"peak_memory_mb_by_device": (800.0, 900.0)})})
        for run in record.measured.runs
        if run.measures
    ]
    several = record.model_copy(update={"measured": record.measured.model_copy(update={"runs": tuple(spread)})})
    text = report_text(several, ())
    assert "| peak memory, MB, device 0 | 800 | 800 |" in text and "| peak memory, MB, device 1 | 900 | 900 |" in text


def test_the_page_loads_nothing_and_draws_every_curve(record: ComparisonRecord) -> None:
    drawn = figures(record)
    text = page(report_text(record, drawn), drawn, record.run_name)
    tags = Tags()
    tags.feed(text)
    assert tags.references == []
    assert not tags.names & {"script", "link", "img", "iframe", "object", "a"}
    assert text.count("<svg") == len(drawn) and {"reward", "loss_scale", "step_time_ms"} <= set(drawn)
    assert "&lt;script&gt;" in text
    assert re.search(r"<th>bf16</th>", text)


def test_the_markdown_alone_carries_its_curves(record: ComparisonRecord) -> None:
    drawn = figures(record)
    text = with_images(report_text(record, drawn), drawn)
    assert "(curves/" not in text and text.count("(data:image/svg+xml;base64,") == len(drawn)


@pytest.mark.parametrize(("value", "text"), [(None, ""), (0.0, "0"), (1234.5, "1,234"), (0.000123456, "0.0001235"), (99.994, "99.99")])
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert shown(value) == text
