"""Predict the peak of the training program's memory, phase by phase and by category.

Launch: ``python -m tasks.programs.predict_memory REQUEST.json`` (a PredictionRequest). Reads the base model's config.json, writes
a MemoryPrediction for each wanted peak and ``result.json`` beside the request. Takes seconds a peak, and no weights.
"""

import sys
import warnings

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from tasks.files import write_record
from tasks.peak_memory import PredictionRequest, ProcessBytes, expected_peak
from tasks.program_request import PROGRESS_PREFIX
from tasks.programs import lifecycle
from tasks.programs.device_memory import detect_device_type, device_memory, own_bytes
from tasks.programs.dry_run import dry_run
from tasks.programs.grpo import cast_copy
from tasks.programs.half_precision import fast_half_matmul
from tasks.records import Precision

_TINY = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, dtype="float32")
_TOKENS = 24


def predict(request: PredictionRequest) -> None:
    """Predict and write down, one peak after the other."""
    # torch warns that fake tensors have no data pointer
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    # what it keeps in memory of its own; 0 where the platform does not tell
    import_bytes = own_bytes(b"RssAnon:") if sys.platform == "linux" else 0
    device_type = detect_device_type()
    memory = device_memory(device_type)
    config = AutoConfig.from_pretrained(request.base_model_dir, local_files_only=True)
    # before any dry run, which takes memory of its own; the highest use so far counts, so bf16, which takes most, comes last:
    # after the others, 3 MB more were found on a CPU than alone
    kinds = sorted({peak.precision for peak in request.peaks.values()}, key=_by_use)
    seen = {}
    for precision in kinds:
        with fast_half_matmul(device_type, precision.autocast_dtype, precision.sampling_dtype):
            _train_tiny_model(precision)
        seen[precision] = ProcessBytes(import_bytes=import_bytes, runtime_bytes=memory.peak_bytes())
    for number, (name, peak) in enumerate(request.peaks.items(), start=1):
        write_record(request.out_dir / name, expected_peak(dry_run(config, peak), seen[peak.precision], peak))
        print(f"{PROGRESS_PREFIX}predicted {number} of {len(request.peaks)} peaks", flush=True)


def _by_use(precision: Precision) -> tuple[int, str]:
    return ("fp32", "fp16", "bf16").index(precision.label), precision.model_dump_json()


def _train_tiny_model(precision: Precision) -> None:
    """Run two steps of a model of 0.1 million parameters on the device at hand, for what they leave behind."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = LlamaForCausalLM._from_config(_TINY, attn_implementation="eager" if device == torch.device("cpu") else "sdpa").to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with torch.no_grad():
            policy = cast_copy(model, getattr(torch, precision.sampling_dtype)).eval()
            prompts = torch.ones(16, 8, dtype=torch.long, device=device)
            policy.generate(input_ids=prompts, max_new_tokens=_TOKENS, do_sample=True, pad_token_id=0)
        ids = torch.zeros(8, 8 + _TOKENS, dtype=torch.long, device=device)
        mixed = precision.mixed_precision != "no"
        with torch.autocast(ids.device.type, dtype=getattr(torch, precision.autocast_dtype) if mixed else torch.bfloat16, enabled=mixed):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    raise SystemExit(lifecycle.main(PredictionRequest, predict, __doc__))
