"""Predict the peak of the training program's memory, phase by phase and by category.

Launch: ``python -m tasks.programs.predict_memory REQUEST.json`` (a PeakRequest). Reads the base model's config.json, writes a
MemoryPrediction to the request's `out_file` and ``result.json`` beside the request. Takes seconds and no weights.
"""

import warnings

from transformers import AutoConfig

from tasks.files import write_record
from tasks.memory import PeakRequest, expected_peak
from tasks.programs import lifecycle
from tasks.programs.dry_run import dry_run


def predict(request: PeakRequest) -> None:
    """Predict and write down."""
    # torch warns that fake tensors have no data pointer
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    config = AutoConfig.from_pretrained(request.base_model_dir, local_files_only=True)
    write_record(request.out_file, expected_peak(dry_run(config, request), request))


if __name__ == "__main__":
    raise SystemExit(lifecycle.main(PeakRequest, predict, __doc__))
