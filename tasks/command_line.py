"""The command line of a flow: arguments in, one message and an exit code out."""

import argparse
import logging
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from prefect.logging import disable_run_logger

from tasks.attempt_files import state_step
from tasks.errors import HalfstepError, RefusedInput
from tasks.hardware import detect_hardware
from tasks.params import Params, described_fields
from tasks.places import RUNS_DIR
from tasks.precision import plan_precision
from tasks.prediction import with_predictions
from tasks.processes import run_in_own_session
from tasks.records import Hardware, PrecisionPlan, RunRecord
from tasks.report import plan_text
from tasks.request import check_engine, resolve_params
from tasks.run_folder import earlier_attempts, held_run

DEFAULT_PARAMS = "params/retrain.yaml"
EXAMPLES = """\
examples:
  python -m flows.retrain                                      params/retrain.yaml as it stands
  python -m flows.retrain training.seed=7 precision.mode=fp16  override any field, as section.key=value
  python -m flows.retrain --plan                               hardware, attempts and reasons; trains nothing
  python -m flows.retrain --params params/smoke.yaml           the whole pipeline in about a minute
  python -m flows.retrain --resume 20261201-221100-run         go on with a run that was stopped

exit codes: 0 done, 2 refused input, 3 no attempt fitted in memory, 4 diverged, 130 stopped, 1 anything else

fields (see params/*.yaml):
"""


def main(flow: Callable[..., RunRecord], arguments: list[str] | None = None) -> int:
    """Run the retrain flow for a person; return the exit code."""
    asked = _parser().parse_intermixed_args(arguments)
    try:
        return _run(flow, asked)
    except HalfstepError as error:
        print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\n{_stopped_text()}", file=sys.stderr)
        return 130


def _run(flow: Callable[..., RunRecord], asked: argparse.Namespace) -> int:
    if asked.resume and asked.params:
        raise RefusedInput(f"--resume {asked.resume} keeps the run's own params; leave out --params {asked.params}")
    file = asked.params or DEFAULT_PARAMS
    params = resolve_params(file, None, None, None, None, None, asked.overrides, asked.resume)
    if asked.plan:
        hardware, plan = _plan(params)
        print(plan.model_dump_json(indent=2) if asked.json else plan_text(hardware, plan))
        return 0
    # a message of ours says all; any other exception keeps its traceback
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_without_traceback)
    run_in_own_session()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = flow(params=file, overrides=asked.overrides, resume=asked.resume)
    summary = (RUNS_DIR / record.run_name / "summary.txt").read_text(encoding="utf-8")
    print(record.model_dump_json(indent=2) if asked.json else f"\n{summary}", end="")
    return 0


def _plan(params: Params) -> tuple[Hardware, PrecisionPlan]:
    with tempfile.TemporaryDirectory() as folder, disable_run_logger():
        hardware = detect_hardware.fn(Path(folder))
    plan = plan_precision(hardware, params)
    check_engine(hardware, params)
    return hardware, with_predictions(plan, hardware, params, lambda text: print(text, file=sys.stderr))


def _stopped_text() -> str:
    folder = held_run()
    if folder is None:
        return "stopped before the run began; nothing was kept"
    attempts = earlier_attempts(folder)
    state = attempts[-1].outcome.last_state_dir if attempts else None
    kept = f"the training state of step {state_step(state)}" if state else "no training state yet"
    at = f" at step {attempts[-1].outcome.steps_done} of {attempts[-1].outcome.total_steps}" if attempts else " before training"
    return f"stopped{at}; kept {kept} in runs/{folder.name}\ngo on with: python -m flows.retrain --resume {folder.name}"


def _without_traceback(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], HalfstepError | KeyboardInterrupt):
        record.exc_info = record.exc_text = None
    return True


def _parser() -> argparse.ArgumentParser:
    fields = "\n".join(
        textwrap.fill(f"{path}  {text}", width=110, initial_indent="  ", subsequent_indent="      ") for path, text in described_fields()
    )
    parser = argparse.ArgumentParser(
        prog="python -m flows.retrain",
        description="Retrain a language model by reinforcement learning in the right 16-bit precision.",
        epilog=EXAMPLES + fields,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a field of the params file")
    parser.add_argument("--params", metavar="FILE", help=f"params file (default {DEFAULT_PARAMS})")
    parser.add_argument("--plan", action="store_true", help="show hardware, attempts and reasons, and stop")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped, by its name in runs/")
    parser.add_argument("--json", action="store_true", help="print the run's record, or the plan, as JSON on standard output")
    return parser
