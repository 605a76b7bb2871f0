"""MLflow's UI and the report of a comparison as a person sees them: opened in Chromium, without a click within a page."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.flow_runs import ROOT, FlowRun, run_flow
from tests.flows.conftest import free_port, wait_until_healthy

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

THREE_RUNS = (
    "--params",
    "params/compare.yaml",
    "training.max_steps=4",
    "training.per_device_train_batch_size=16",
    "training.max_completion_length=16",
    "comparison.warmup_steps=1",
    "dataset.num_train=64",
    "dataset.num_eval=20",
    "memory.preflight=warn",
    "comparison.seeds=[1]",
)
NAMES = ("bf16-seed1", "fp16-seed1", "fp32-seed1")
COMMANDS = ("chromium", "chromium-browser", "google-chrome")
# what a headless browser asks of its maker or of a GPU is no part of the pages
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# MLflow's page asks who is logged in; a server without logins has no such address
NO_LOGINS = "/ajax-api/2.0/mlflow/users/current"
# a browser's notice that a size is told one frame later; MLflow's charts cause it now and then
RESIZED_TWICE = "ResizeObserver loop completed with undelivered notifications"
PATIENCE_MS = 60_000


@dataclass
class Opened:
    """A page, and what it asked for and complained about."""

    page: "Page"
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.hear(said.text, said.location["url"]) if said.type == "error" else None)

    def hear(self, text: str, url: str) -> None:
        no_logins = url.endswith(NO_LOGINS) and "404" in text
        if not no_logins and RESIZED_TWICE not in text:
            self.errors.append(f"{text} ({url})")

    def keep_picture(self, name: str, folder: Path) -> None:
        self.page.screenshot(path=Path(os.environ.get("HALFSTEP_SCREENSHOTS", folder)) / f"{name}.png")


@pytest.fixture(scope="module")
def chromium() -> "Iterator[Browser]":
    """A headless Chromium; the tests are skipped where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    found = next(filter(None, map(shutil.which, COMMANDS)), None)
    if found is None:
        pytest.skip(f"needs Chromium on the PATH, as one of {', '.join(COMMANDS)}")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def compared(chromium: "Browser", flow_environment: dict[str, str]) -> FlowRun:
    """A comparison of three runs that succeed."""
    run = run_flow(flow_environment, *THREE_RUNS, flow="compare")
    assert run.returncode == 0, run.stderr[-3000:]
    assert [item.status for item in run.comparison.measured.runs] == ["succeeded"] * 3
    return run


@pytest.fixture(scope="module")
def mlflow_url(compared: FlowRun, flow_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The MLflow of `make ui`, started by it, on the comparison's store."""
    port, log_path = free_port(), tmp_path_factory.mktemp("ui") / "mlflow.log"
    with log_path.open("wb") as log:
        # -o: what is installed is taken as it is
        server = subprocess.Popen(
            ["make", "-o", "install", "ui", f"PORT={port}", f"BIN={Path(sys.executable).parent}"],
            cwd=ROOT,
            env=flow_environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log_path)
        yield f"http://127.0.0.1:{port}/"
    finally:
        # the group: make, its shell, the server and its worker
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


@pytest.fixture
def opened(chromium: "Browser") -> Iterator[Opened]:
    page = chromium.new_page(viewport={"width": 1600, "height": 1200})
    yield Opened(page)
    page.close()


def links(opened: Opened, mlflow_url: str, compared: FlowRun) -> dict[str, str]:
    """Open the comparison's run in MLflow and return the links of its description."""
    run = compared.client.get_run(compared.comparison.tracking_run_id)
    opened.page.goto(f"{mlflow_url}#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}")
    description = opened.page.locator("ul", has=opened.page.get_by_role("link", name="every curve"))
    description.wait_for()
    assert opened.page.get_by_text("Indicative only, and no verdict").first.is_visible()
    return {link.inner_text(): link.evaluate("link => link.href") for link in description.get_by_role("link").all()}


def assert_clean(opened: Opened, home: str) -> None:
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith((home, "data:", "blob:"))] == []


def drawn_runs(page: "Page") -> list[str]:
    """Wait for plotly's lines and return the names of the runs they belong to; a path of one point is no line."""
    lines = page.locator("path.js-line")
    lines.nth(len(NAMES) - 1).wait_for(state="attached")
    name = "line => line.closest('g.trace').__data__[0].trace.name"
    return sorted({str(line.evaluate(name)) for line in lines.all() if "L" in (line.get_attribute("d") or "")})


def assert_named(page: "Page") -> None:
    for name in NAMES:
        page.get_by_text(name, exact=True).first.wait_for()


def test_mlflow_draws_the_reward_of_all_runs_in_one_plot(opened: Opened, mlflow_url: str, compared: FlowRun, tmp_path: Path) -> None:
    opened.page.goto(links(opened, mlflow_url, compared)["curves of the reward"])
    assert drawn_runs(opened.page) == list(NAMES)
    assert_named(opened.page)
    legend = opened.page.get_by_text("(reward)").all_inner_texts()
    assert [f"{name} (reward)" for name in NAMES] == sorted(legend)
    opened.keep_picture("mlflow-reward", tmp_path)
    assert_clean(opened, mlflow_url)


def test_mlflow_lists_the_runs_beside_every_curve(opened: Opened, mlflow_url: str, compared: FlowRun, tmp_path: Path) -> None:
    opened.page.goto(links(opened, mlflow_url, compared)["every curve"])
    assert_named(opened.page)
    assert drawn_runs(opened.page) == list(NAMES)
    opened.keep_picture("mlflow-charts", tmp_path)
    assert_clean(opened, mlflow_url)


def test_mlflow_sets_the_runs_side_by_side(opened: Opened, mlflow_url: str, compared: FlowRun, tmp_path: Path) -> None:
    opened.page.goto(links(opened, mlflow_url, compared)["measures side by side"])
    assert_named(opened.page)
    boxes = [opened.page.get_by_text(name, exact=True).first.bounding_box() for name in NAMES]
    assert len({box["y"] for box in boxes if box}) == 1 and len({box["x"] for box in boxes if box}) == len(NAMES)
    rows = [row.split() for row in opened.page.get_by_role("row").all_inner_texts()]
    assert ["variant", "bf16", "fp16", "fp32"] in rows
    # the table of metrics has only the rows in sight; each has a link to its curve
    opened.page.get_by_title("Plot chart").filter(has_text="entropy").wait_for()
    opened.page.locator("canvas").first.wait_for()
    opened.keep_picture("mlflow-compare", tmp_path)
    assert_clean(opened, mlflow_url)


def test_the_report_shows_verdict_tables_and_curves_and_loads_nothing(opened: Opened, compared: FlowRun, tmp_path: Path) -> None:
    report = (compared.run_dir / "report.html").as_uri()
    opened.page.goto(report, wait_until="networkidle")
    assert opened.page.locator("p > strong").first.inner_text() == " ".join(compared.comparison.measured.verdict.sentences)
    heads = [table.locator("th").all_inner_texts() for table in opened.page.locator("table").all()]
    assert heads[0] == ["measure", "bf16", "fp16", "fp32"] and heads[1][:3] == ["order", "variant", "seed"]
    figures = opened.page.locator("svg")
    assert figures.count() == len(list((compared.run_dir / "curves").iterdir())) >= 4
    for figure in figures.all():
        assert all(path.get_attribute("d") for path in figure.locator("path").all()) and figure.locator("path").count()
        box = figure.bounding_box()
        assert box and box["width"] > 300 and box["height"] > 100
    reward = figures.filter(has=opened.page.locator("title", has_text="mean reward")).locator("[id^='curve-'] > path").all()
    assert len(reward) == 3 and all(str(line.get_attribute("d")).count("L") == 3 for line in reward)
    opened.keep_picture("report", tmp_path)
    assert opened.errors == [] and opened.requests == [report]
