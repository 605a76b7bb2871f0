"""Comparisons as a machine could have made them: curves, times, memory and answers of each run, drawn at random."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.comparison_records import MeasuredRun
from tasks.measures import run_measures
from tasks.records import Outcome, RunFolder, SourceVersion, TrackedRun

WARMUP_STEPS, NUM_STEPS, NUM_PROBLEMS = 4, 104, 200
TRACKED = TrackedRun(tracking_uri="none", experiment_id="0", run_id="0")
OUTCOME = Outcome(status="succeeded", steps_done=NUM_STEPS, total_steps=NUM_STEPS)
Array = np.ndarray
# noise with a correlation of 0.5 from one step to the next
MEMORY = np.linalg.cholesky(0.5 ** np.abs(np.subtract.outer(np.arange(NUM_STEPS), np.arange(NUM_STEPS))))


def run_folder(name: str, runs_dir: Path) -> RunFolder:
    """Return the folder of a comparison that was made from a clean commit."""
    source = SourceVersion(git_commit="abc", dirty=False)
    return RunFolder(name=name, run_dir=runs_dir / name, started_at="2026-12-02", flow_run_id=None, flow="compare", source=source)


@dataclass(frozen=True)
class Plant:
    """What sets one variant apart: factors of times, memory and noise of the curves, logits of a solution, steps skipped at first."""

    step_time: float = 1.0
    memory: float = 1.0
    noise: float = 1.0
    logit: float = 0.0
    early_skips: int = 0


def autocorrelated(rng: np.random.Generator) -> Array:
    """Return noise of unit variance, one value a step."""
    return MEMORY @ rng.standard_normal(NUM_STEPS)


def one_run(rng: np.random.Generator, plant: Plant, seed_effects: Array, position: int) -> list[dict[str, float]]:
    """Return a run's steps: a machine that slows down, has slow steps and bad runs, and curves of which each run has its own."""
    progress = np.linspace(0, 1, NUM_STEPS)
    run_slowness = 0.01 * rng.standard_normal() + 0.002 * position + 0.02 * (rng.random() < 0.05)
    times = 1000 * plant.step_time * np.exp(0.05 * seed_effects[0] + run_slowness + 0.04 * autocorrelated(rng))
    times *= np.where(rng.random(NUM_STEPS) < 0.05, 1.5, 1.0)
    times[:WARMUP_STEPS] *= 3
    # in blocks of an allocator, with a jump now and then
    peak = plant.memory * 3000 * (1 + 0.002 * seed_effects[1] + 0.01 * (rng.random() < 0.1))
    noise = plant.noise * np.exp(0.05 * seed_effects[2] + 0.05 * rng.standard_normal())
    reward = 0.2 + 0.05 * rng.standard_normal() + 0.5 * (1 - np.exp(-3 * progress)) + 0.05 * noise * autocorrelated(rng)
    entropy = 2 - progress + 0.1 * noise * autocorrelated(rng)
    grad_norm = np.exp(0.3 * noise * autocorrelated(rng))
    skipped = rng.random(NUM_STEPS) < 0.02
    skipped[: plant.early_skips] = True
    columns = {
        "step": np.arange(1, NUM_STEPS + 1),
        "step_time_ms": times,
        "forward_backward_time_ms": 0.4 * times,
        "rollout_time_ms": 0.5 * times,
        "tokens_per_second": 1e6 / times,
        "peak_memory_mb": np.full(NUM_STEPS, 2 * round(peak / 2)),
        "loss": np.zeros(NUM_STEPS),
        "reward": reward,
        "entropy": entropy,
        "grad_norm": np.where(skipped, np.inf, grad_norm),
        "step_skipped": skipped,
        "loss_scale": np.full(NUM_STEPS, 4096.0),
    }
    rows = zip(*(column.astype(float).tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def comparison(rng: np.random.Generator, plants: Mapping[str, Plant], num_seeds: int = 3) -> Sequence[MeasuredRun]:
    """Return the runs of one comparison, their order rotated between seeds; the base model is as good as an unplanted variant."""
    difficulty = 1.5 * rng.standard_normal(NUM_PROBLEMS)
    base = tuple((rng.random(NUM_PROBLEMS) < 1 / (1 + np.exp(difficulty))).tolist())
    names, runs = list(plants), []
    for seed in range(num_seeds):
        seed_effects = rng.standard_normal(4)
        for position in range(len(names)):
            name = names[(position + seed) % len(names)]
            logit = plants[name].logit + 0.1 * seed_effects[3] + 0.1 * rng.standard_normal() - difficulty
            runs.append(
                MeasuredRun(
                    variant=name,
                    seed=seed,
                    order=len(runs),
                    status="succeeded",
                    measures=run_measures(one_run(rng, plants[name], seed_effects, position), WARMUP_STEPS, OUTCOME),
                    correct=tuple((rng.random(NUM_PROBLEMS) < 1 / (1 + np.exp(-logit))).tolist()),
                    base_correct=base,
                )
            )
    return runs
