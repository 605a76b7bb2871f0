"""What a run's folder says of an attempt that left no outcome."""

from pathlib import Path

from tasks.params import Params
from tasks.precision import plan_precision
from tasks.records import TrainingJob
from tasks.run_folder import interrupted_outcome
from tests.machines import hardware_of


def test_an_attempt_that_died_before_its_first_step_stands_where_it_went_on_from(tmp_path: Path) -> None:
    first = plan_precision(hardware_of("cpu_epyc_9r14"), Params()).attempts[0]
    for state, step in ((None, 0), (tmp_path / "checkpoint-4", 4)):
        resumed = first.model_copy(update={"resume_from": state})
        params = Params().model_dump(mode="json")
        outcome = interrupted_outcome(
            TrainingJob(attempt=resumed, params=params, dataset_dir=tmp_path, base_model_dir=tmp_path, attempt_dir=tmp_path)
        )
        assert (outcome.status, outcome.first_step, outcome.steps_done, outcome.last_state_dir) == ("cancelled", step, step, state)
