"""The report of a comparison: one Markdown text, and the same as a page that needs nothing else. Pure, but for reading metrics files."""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from markdown_it import MarkdownIt

from tasks.attempt_files import read_steps
from tasks.comparison_measures import DEVICE_PEAK, ComparisonRecord, run_values, variant_means
from tasks.comparison_records import MeasuredRun, RunMeasures
from tasks.curves import Curve, draw
from tasks.memory import MB
from tasks.params import Params

MEASURES = {name: field.title for name, field in RunMeasures.model_fields.items() if field.title}
RUN_MEASURES = ("reward", "accuracy", "accuracy_low", "accuracy_high", "step_time_ms", "peak_memory_mb", "skipped_steps")
CURVES = {
    "reward": "mean reward",
    "entropy": "entropy of the policy",
    "grad_norm": "gradient norm, unscaled, before clipping",
    "loss": "loss (about 0 by construction)",
    "loss_scale": "loss scale",
    "step_time_ms": "ms a step",
    "mismatch_kl": "mismatch of rollout and training, KL in nats",
}
STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;display:block;overflow-x:auto;font-size:.85rem;margin:1rem 0}"
    "th,td{border:1px solid #ccc;padding:.2rem .5rem;text-align:left;font-variant-numeric:tabular-nums}svg{max-width:100%;height:auto}"
)


def figures(record: ComparisonRecord) -> dict[str, str]:
    """Return the curves as SVG by name, read from the runs' metrics; those without a point are left out."""
    steps = [(done.attempt.variant, read_steps(done.attempt_dir)) for done in record.attempts]
    drawn = {}
    for name, title in CURVES.items():
        curves = [
            Curve(variant, [[(step["step"], step[name]) for step in its if name in step] for owner, its in steps if owner == variant])
            for variant in dict.fromkeys(variant for variant, _ in steps)
        ]
        drawn[name] = draw(title, curves, powers_of_two=name == "loss_scale")
    return {name: svg for name, svg in drawn.items() if svg}


def report_text(record: ComparisonRecord, drawn: Iterable[str]) -> str:
    """Return the report as Markdown, with the curves `drawn` as ``curves/<name>.svg``."""
    verdict = record.measured.verdict
    parts = [
        f"# {', '.join(dict.fromkeys(run.variant for run in record.measured.runs))} compared: {plain(record.run_name)}",
        "**" + " ".join(map(plain, verdict.sentences)) + "**",
        *(["Indicative only: too few measured steps or seeds for a verdict."] if verdict.indicative else []),
        "\n".join(f"- {plain(finding.sentence)}" for finding in verdict.findings),
        "## Variants",
        _variants(record),
        "Means over the seeds that succeeded; of the lowest loss scale the least, of the largest mismatch the largest. "
        "Warm-up steps are left out, except for peak memory, skipped steps, loss scale and steps that are not finite.",
        "## Runs",
        _runs(record.measured.runs),
        "## Curves",
        "A line is the mean over the seeds, its band reaches from the least to the largest. On-policy GRPO's loss is about 0 by "
        "construction, whatever is learned: look at reward, entropy and gradient norm.",
        *(f"![{CURVES[name]}](curves/{name}.svg)" for name in drawn),
        *_contrasts(record),
        *_serving(record),
        *_memory(record),
        "## How it was measured",
        *_method(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def page(text: str, drawn: Mapping[str, str], title: str) -> str:
    """Return the Markdown as an HTML page with the curves in it; it loads nothing."""
    body = MarkdownIt("js-default", {"html": False}).render(text)
    body = re.sub(r'<img src="curves/(\w+)\.svg"[^>]*>', lambda found: drawn[found[1]], body)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}</body></html>\n'


def with_images(text: str, drawn: Mapping[str, str]) -> str:
    """Return the Markdown with its curves as data, for a reader that has no files beside it."""
    data = {name: base64.b64encode(svg.encode()).decode() for name, svg in drawn.items()}
    return re.sub(r"\(curves/(\w+)\.svg\)", lambda found: f"(data:image/svg+xml;base64,{data[found[1]]})", text)


def time_text(record: ComparisonRecord) -> str:
    """Return the comparison's wall time beside the sum of its training processes."""
    wall, training = record.wall_seconds, record.training_seconds
    ratio = f", {wall / training:.2f} times" if wall and training else ""
    return f"{f'{wall:,.0f} s' if wall else 'not known (interrupted)'}{ratio}; the training processes took {training:,.0f} s"


def shown(value: float | None) -> str:
    """Return a number with four digits, as every table here has it."""
    return "" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def plain(text: str) -> str:
    """Return a text that Markdown leaves as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def _variants(record: ComparisonRecord) -> str:
    means, runs = variant_means(record.measured.runs), record.measured.runs
    ended = [
        f"{sum(run.status == 'succeeded' for run in runs if run.variant == name)} of {sum(run.variant == name for run in runs)}"
        for name in means
    ]
    known = {name for its in means.values() for name in its}
    devices = {name: f"peak memory, MB, device {name.removeprefix(DEVICE_PEAK)}" for name in sorted(known) if name.startswith(DEVICE_PEAK)}
    rows = [["measure", *map(plain, means)], ["runs that succeeded", *ended]]
    rows += [[label, *(shown(its.get(name)) for its in means.values())] for name, label in {**MEASURES, **devices}.items() if name in known]
    return table(rows)


def _runs(runs: tuple[MeasuredRun, ...]) -> str:
    rows = [["order", "variant", "seed", "ended", "reward", "accuracy", "from", "to", "ms a step", "peak MB", "skipped", "what happened"]]
    for run in runs:
        values = [shown(run_values(run).get(name)) for name in RUN_MEASURES]
        rows.append([str(run.order), plain(run.variant), str(run.seed), plain(run.status), *values, plain(run.what_happened)[:400]])
    return table(rows)


def _contrasts(record: ComparisonRecord) -> list[str]:
    found = [contrast for finding in record.measured.verdict.findings for contrast in finding.contrasts]
    rows = [["measure", "better", "worse", "effect", "from", "to", "p, adjusted", "shown"]]
    for one in found:
        numbers = [shown(value) for value in (one.effect, one.low, one.high, one.p_value)]
        rows.append([plain(one.measure), plain(one.better), plain(one.worse), *numbers, "yes" if one.shown else "no"])
    note = (
        "The effect is worse / better, for lost steps, accuracy and reward the difference. Intervals hold jointly at 95 % (Bonferroni); "
        "the p values are sharper (Holm), so that a difference can be shown whose interval just reaches none."
    )
    return ["## Variants against each other", table(rows), note] if found else []


def _serving(record: ComparisonRecord) -> list[str]:
    rows = [["format", "accuracy", "from", "to", "decode, ms a token", "what happened"]]
    for one in record.measured.serving:
        its = one.accuracy
        numbers = [shown(value) for value in ((its.share, its.low, its.high) if its else (None, None, None))]
        rows.append([one.precision, *numbers, shown(one.decode_time_ms), plain(one.what_happened)[:400]])
    batch = record.params["evaluation"]["batch_size"]
    note = (
        f"The checkpoint of {plain(record.measured.served)} in each format, in batches of {batch}; prompts are part of the time, "
        "which is measured once in each format."
    )
    return ["## Serving", table(rows), note] if len(rows) > 1 else []


def _memory(record: ComparisonRecord) -> list[str]:
    first = {done.attempt.variant: done.attempt.prediction for done in reversed(record.attempts) if done.attempt.prediction}
    predicted = {variant: first[variant] for variant in dict.fromkeys(done.attempt.variant for done in record.attempts) if variant in first}
    names = dict.fromkeys(name for prediction in predicted.values() for name in prediction.categories)
    rows = [["predicted, MB", *map(plain, predicted)]]
    rows += [[name.replace("_", " "), *(shown(its.categories.get(name, 0) / MB) for its in predicted.values())] for name in names]
    rows.append(["peak", *(shown(its.peak_bytes / MB) for its in predicted.values())])
    return ["## Memory by category", table(rows)] if predicted else []


def _method(record: ComparisonRecord) -> list[str]:
    params, machine = Params.model_validate(record.params), record.hardware
    training, asked = params.training, params.comparison
    steps = f"{training.max_steps - asked.warmup_steps} measured steps after {asked.warmup_steps} of warm-up"
    temperature = params.evaluation.temperature
    how = f"at temperature {temperature:g}, with the same seed by every model," if temperature else "greedily"
    work = f"{training.effective_batch_size} completions a step in groups of {training.num_generations}"
    said = [f"{name} ({', '.join(f'{path} {value}' for path, value in fields.items())})" for name, fields in asked.variants.items()]
    rehearsed = dict.fromkeys(done.attempt.variant for done in record.attempts if done.attempt.rehearsal)
    device = f"{machine.device_count} x {machine.device_name} ({machine.device_type})"
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    driver = f", driver {machine.driver_version}" if machine.driver_version else ""
    lines = [
        f"Variants: {'; '.join(said)}. {record.plan.reason}. Seeds {', '.join(map(str, asked.seeds))}.",
        f"Work: base model {params.base_model.source}, {steps}, {work}, {training.max_completion_length} tokens at most; the same "
        "prompts in the same order, the same seeds.",
        f"Held out: {record.dataset.num_eval} problems, answered {how} in the format that trained (an fp32 head or a rollout's "
        "own dtype is no part of it); 95 % Wilson intervals.",
        f"Time of the whole comparison: {time_text(record)}.",
        f"Machine: {device}, {machine.num_cpus} CPUs{driver}, {machine.memory_total_bytes / MB:,.0f} MB; {versions}; "
        f"source {record.run.source.git_commit or 'not in git'}{' with changes' if record.run.source.dirty else ''}.",
    ]
    if rehearsed:
        lines.append(
            f"{', '.join(rehearsed)}: a rehearsal on a CPU that emulates the format; its numerics hold, its times are those of the "
            "emulation here and say nothing of hardware with units for it."
        )
    return [plain(line) for line in lines]
