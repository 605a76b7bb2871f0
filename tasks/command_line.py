"""The command line of a flow: arguments in, one message and an exit code out."""

import argparse
import logging
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from prefect.logging import disable_run_logger

from tasks.attempt_files import state_step
from tasks.comparison import plan_comparison, predicted_comparison, resolve_comparison
from tasks.comparison_measures import ComparisonRecord
from tasks.errors import HalfstepError, RefusedInput
from tasks.hardware import detect_hardware
from tasks.params import Params, RetryParams, described_fields
from tasks.places import RUNS_DIR, as_found
from tasks.precision import plan_precision
from tasks.prediction import with_predictions
from tasks.processes import run_in_own_session
from tasks.records import Hardware, PrecisionPlan, RunRecord
from tasks.report import plan_text
from tasks.request import check_engine, resolve_params
from tasks.run_folder import earlier_attempts, held_run
from tasks.settled import settle


class Option(NamedTuple):
    """An option that one flow has beside those of all."""

    name: str
    metavar: str
    text: str
    parse: Callable[[str], object]


class Command(NamedTuple):
    """What sets the command line of one flow apart."""

    flow: str
    description: str
    examples: str
    default_params: str
    resolve: Callable[..., Params]
    plan: Callable[[Hardware, Params], PrecisionPlan]
    predict: Callable[[PrecisionPlan, Hardware, Params, Callable[[str], None]], PrecisionPlan]
    options: tuple[Option, ...] = ()


RETRAIN_EXAMPLES = """\
  python -m flows.retrain                                      params/retrain.yaml as it stands
  python -m flows.retrain training.seed=7 precision.mode=fp16  override any field, as section.key=value
  python -m flows.retrain --plan                               hardware, attempts and reasons; trains nothing
  python -m flows.retrain --params params/smoke.yaml           the whole pipeline in about a minute
  python -m flows.retrain --resume 20261201-221100-run         go on with a run that was stopped, diverged or did not fit
  python -m flows.retrain --resume RUN memory.budget_mb=4000   go on with more memory, or other memory levers

exit codes: 0 done, 2 refused input, 3 no attempt fitted in memory, 4 diverged, 130 stopped, 1 anything else
"""
COMPARE_EXAMPLES = """\
  python -m flows.compare                                      params/compare.yaml as it stands
  python -m flows.compare --variants bf16,fp32 --seeds 1       two of its variants, one seed each
  python -m flows.compare --variants fp32,slow 'comparison.variants.slow={precision.mode: fp32, training.learning_rate: 1e-4}'
                                                               any setting, as a variant of your own
  python -m flows.compare --plan                               hardware, runs in their order, predicted peaks; trains nothing
  python -m flows.compare --resume 20261201-221100-run         go on with a comparison that was stopped

exit codes: 0 done, 2 refused input, 130 stopped, 1 anything else (no run succeeded)
"""
VARIANT_OPTIONS = (
    Option("--variants", "NAME,NAME", "variants to compare, out of comparison.variants (default: all)", lambda text: text.split(",")),
    Option("--seeds", "N", "how many rounds, counted on from the first of comparison.seeds", int),
)


def main(flow: Callable[..., RunRecord | ComparisonRecord], arguments: list[str] | None = None, command: Command | None = None) -> int:
    """Run a flow for a person, retrain if no other command is named; return the exit code."""
    command = command or RETRAIN
    asked = _parser(command).parse_intermixed_args(arguments)
    try:
        return _run(flow, asked, command)
    except HalfstepError as error:
        print(f"\n{error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"\n{_stopped_text(command)}", file=sys.stderr)
        return 130


def _run(flow: Callable[..., RunRecord | ComparisonRecord], asked: argparse.Namespace, command: Command) -> int:
    if asked.resume and asked.params:
        raise RefusedInput(f"--resume {asked.resume} keeps the run's own params; leave out --params {asked.params}")
    request = {name: value for name, value in vars(asked).items() if name not in ("plan", "json")}
    request["params"] = asked.params or command.default_params
    params = command.resolve(**request)
    if asked.plan:
        hardware, plan = _plan(params, command)
        print(plan.model_dump_json(indent=2) if asked.json else plan_text(hardware, plan))
        return 0
    # a message of ours is told whole at the end, and Prefect's lines keep its first; any other exception keeps its traceback
    for name in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(_in_one_line)
    run_in_own_session()
    record = flow(**request)
    summary = (RUNS_DIR / record.run_name / "summary.txt").read_text(encoding="utf-8")
    print(record.model_dump_json(indent=2) if asked.json else f"\n{summary}", end="")
    return 0


def _plan(params: Params, command: Command) -> tuple[Hardware, PrecisionPlan]:
    with tempfile.TemporaryDirectory() as folder, disable_run_logger():
        hardware = detect_hardware.fn(Path(folder))
    plan = command.plan(hardware, params)
    return hardware, command.predict(plan, hardware, params, lambda text: print(text, file=sys.stderr))


def _plan_retrain(hardware: Hardware, params: Params) -> PrecisionPlan:
    settled = settle(hardware, params)
    params = settled.applied(params)
    plan = plan_precision(hardware, params, settled.because)
    check_engine(hardware, params)
    return plan


def _stopped_text(command: Command) -> str:
    folder = held_run()
    if folder is None:
        return "stopped before the run began; nothing was kept"
    attempts, again = earlier_attempts(folder), f"go on with: python -m flows.{command.flow} --resume {folder.name}"
    if command is COMPARE:
        num_done = sum(done.outcome.status != "cancelled" for done in attempts)
        return f"stopped after {num_done} runs, which are kept in {as_found(folder.run_dir)}; the one under way will be made again\n{again}"
    state = attempts[-1].outcome.last_state_dir if attempts else None
    kept = f"the training state of step {state_step(state)}" if state else "no training state yet"
    at = f" at step {attempts[-1].outcome.steps_done} of {attempts[-1].outcome.total_steps}" if attempts else " before training"
    return f"stopped{at}; kept {kept} in {as_found(folder.run_dir)}\n{again}"


def _in_one_line(record: logging.LogRecord) -> bool:
    if record.exc_info and isinstance(record.exc_info[1], HalfstepError | KeyboardInterrupt):
        record.exc_info = record.exc_text = None
    text = record.getMessage()
    if not record.exc_info and text.startswith(("Encountered exception", "Finished in state Failed")):
        # an exception's text comes with its ends of lines or, in a repr, with those escaped
        record.msg, record.args = re.split(r"\n|\\n", text, maxsplit=1)[0], ()
    return True


def _parser(command: Command) -> argparse.ArgumentParser:
    described = [*described_fields(), *described_fields(RetryParams, "memory.retries[0].")]
    fields = "\n".join(
        textwrap.fill(f"{path}  {text}", width=110, initial_indent="  ", subsequent_indent="      ") for path, text in described
    )
    parser = argparse.ArgumentParser(
        prog=f"python -m flows.{command.flow}",
        description=command.description,
        epilog=f"examples:\n{command.examples}\nfields (see params/*.yaml):\n{fields}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a field of the params file")
    parser.add_argument("--params", metavar="FILE", help=f"params file (default {command.default_params})")
    for option in command.options:
        parser.add_argument(option.name, metavar=option.metavar, help=option.text, type=option.parse)
    parser.add_argument("--plan", action="store_true", help="show hardware, attempts and reasons, and stop")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that ended early, by its name in runs/")
    parser.add_argument("--json", action="store_true", help="print the run's record, or the plan, as JSON on standard output")
    return parser


RETRAIN = Command(
    flow="retrain",
    description="Retrain a language model by reinforcement learning in the right 16-bit precision.",
    examples=RETRAIN_EXAMPLES,
    default_params="params/retrain.yaml",
    resolve=resolve_params,
    plan=_plan_retrain,
    predict=with_predictions,
)
COMPARE = Command(
    flow="compare",
    description="Compare precision variants on the same work: one report, one verdict.",
    examples=COMPARE_EXAMPLES,
    default_params="params/compare.yaml",
    resolve=resolve_comparison,
    plan=plan_comparison,
    predict=predicted_comparison,
    options=VARIANT_OPTIONS,
)
