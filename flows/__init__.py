"""Flows, run from the project's root; ``state/`` must exist before Prefect puts its home there (pyproject.toml)."""

from tasks.places import PROJECT_DIR

(PROJECT_DIR / "state" / "prefect").mkdir(parents=True, exist_ok=True)
