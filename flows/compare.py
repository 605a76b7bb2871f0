"""The compare flow: the same work in each variant and seed, each run in a process of its own -> evaluation -> one verdict.

Launch: ``python -m flows.compare [--params FILE] [--variants A,B] [--seeds N] [key=value ...]``, or
``prefect deployment run 'compare/on-demand'``.
"""

import shutil

from prefect import flow

from tasks.artifacts import fetch_base_model, prepare_dataset
from tasks.command_line import COMPARE, main
from tasks.comparison import decide_order, next_run, predict_variants, resolve_comparison, variant_params
from tasks.comparison_log import conclude_comparison
from tasks.comparison_measures import ComparisonRecord, measure
from tasks.errors import AttemptFailed
from tasks.hardware import detect_hardware
from tasks.places import as_found
from tasks.prediction import predict_peak
from tasks.records import RunSetting
from tasks.run_folder import earlier_attempts, open_run
from tasks.run_log import close_runs, record_inputs, start_tracking
from tasks.training import train


@flow(name="compare", on_failure=[close_runs], on_crashed=[close_runs], on_cancellation=[close_runs])
def compare(
    params: str = "params/compare.yaml",
    variants: list[str] | None = None,
    seeds: int | None = None,
    overrides: list[str] | None = None,
    resume: str | None = None,
) -> ComparisonRecord:
    """Compare precision variants on the same work and give one verdict.

    Args:
        params: params file, from the project's root
        variants: names out of comparison.variants; all of them when left out
        seeds: how many rounds, counted on from the first of comparison.seeds
        overrides: further key=value overrides, such as training.max_steps=205
        resume: name of an interrupted comparison to go on with; then all else is left out
    """
    resolved = resolve_comparison(params, variants, seeds, overrides, resume)
    run = open_run(resolved, resume)
    hardware = detect_hardware(run.run_dir)
    plan = decide_order(run.run_dir, hardware, resolved)
    tracked = start_tracking(run, resolved, hardware, plan)
    base_model = fetch_base_model(resolved, run.run_dir)
    dataset = prepare_dataset(resolved, base_model, run.run_dir)
    setting = RunSetting(run=run, tracked=tracked, hardware=hardware, plan=plan, base_model=base_model, dataset=dataset)
    record_inputs(setting, resolved)
    predict_variants(setting, resolved)
    finished = earlier_attempts(run)
    while attempt := next_run(plan, finished):
        own = variant_params(resolved, attempt.variant, attempt.seed)
        done = train(predict_peak(attempt, setting, own), setting, own)
        # of no use to a comparison: a run that is cut off is made again
        shutil.rmtree(done.attempt_dir / "states", ignore_errors=True)
        finished = (*finished, done)
    record = conclude_comparison(setting, resolved, finished, measure(setting, resolved, finished))
    if all(run.status != "succeeded" for run in record.measured.runs):
        raise AttemptFailed(f"no run of the comparison succeeded; what happened to each: {as_found(run.run_dir)}/report.html")
    return record


if __name__ == "__main__":
    raise SystemExit(main(compare, command=COMPARE))
