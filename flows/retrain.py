"""The retrain flow: hardware -> precision -> bf16 baseline -> fp16 retry after a shortage of memory -> evaluation.

Launch: ``python -m flows.retrain [--params FILE] [key=value ...]``, or ``prefect deployment run 'retrain/on-demand'``.
"""

from prefect import flow

from tasks.artifacts import fetch_base_model, prepare_dataset, version_checkpoint
from tasks.command_line import main
from tasks.evaluation import evaluate
from tasks.hardware import detect_hardware
from tasks.next_attempt import next_attempt
from tasks.params import PrecisionMode
from tasks.precision import decide_precision
from tasks.prediction import predict_peak, what_would_fit
from tasks.records import RunRecord, RunSetting
from tasks.request import check_engine, resolve_params
from tasks.run_folder import earlier_attempts, open_run
from tasks.run_log import close_runs, conclude_run, record_inputs, start_tracking
from tasks.settled import take_over
from tasks.training import failure_of, train


@flow(name="retrain", on_failure=[close_runs], on_crashed=[close_runs], on_cancellation=[close_runs])
def retrain(
    params: str = "params/retrain.yaml",
    precision: PrecisionMode | None = None,
    max_steps: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    memory_budget_mb: float | None = None,
    overrides: list[str] | None = None,
    resume: str | None = None,
) -> RunRecord:
    """Retrain a language model by reinforcement learning in the right 16-bit precision.

    Args:
        params: params file, from the project's root
        precision: auto, measured, bf16, fp16 or fp32; the params file's when left out
        max_steps: optimizer steps
        learning_rate: peak learning rate
        seed: seed of sampling and data order
        memory_budget_mb: MB that training may take
        overrides: further key=value overrides, such as training.num_generations=4
        resume: name of an interrupted run to go on with; then only memory and its levers may be set
    """
    resolved = resolve_params(params, precision, max_steps, learning_rate, seed, memory_budget_mb, overrides, resume)
    run = open_run(resolved, resume)
    hardware = detect_hardware(run.run_dir)
    settled = take_over(run.run_dir, hardware, resolved)
    resolved = settled.applied(resolved)
    plan = decide_precision(hardware, resolved, settled.because)
    check_engine(hardware, resolved)
    tracked = start_tracking(run, resolved, hardware, plan)
    base_model = fetch_base_model(resolved, run.run_dir)
    dataset = prepare_dataset(resolved, base_model, run.run_dir)
    setting = RunSetting(run=run, tracked=tracked, hardware=hardware, plan=plan, base_model=base_model, dataset=dataset)
    record_inputs(setting, resolved)
    finished = earlier_attempts(run)
    while attempt := next_attempt(plan, finished, resolved):
        attempt = predict_peak(attempt, setting, resolved)
        finished = (*finished, train(attempt, setting, resolved))
    if finished[-1].outcome.status != "succeeded":
        conclude_run(setting, resolved, finished)
        raise failure_of(finished, what_would_fit(setting, resolved, finished))
    checkpoint = version_checkpoint(run, finished[-1])
    evaluation = evaluate(setting, resolved, finished[-1], checkpoint)
    return conclude_run(setting, resolved, finished, evaluation, checkpoint)


if __name__ == "__main__":
    raise SystemExit(main(retrain))
