"""Draw curves as SVG: a line for each variant, the mean over its seeds, in a band from the least to the largest of them. Pure."""

import io
import math
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's, told apart by people who see colours otherwise; dashes follow where they run out
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES = [style for style in ("solid", "dashed", "dotted") for _ in COLOURS]
# letters stay letters, and two drawings of the same curves are the same bytes
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "halfstep"}


class Curve(NamedTuple):
    """One variant: its (step, value) points, a sequence a seed. What is not finite is left out."""

    name: str
    seeds: Sequence[Sequence[tuple[float, float]]]


def values_by_step(curve: Curve) -> dict[float, list[float]]:
    """Return the finite values of all seeds at each step that any of them has, the first step first."""
    values: dict[float, list[float]] = {}
    for step, value in sorted(chain(*curve.seeds)):
        if math.isfinite(value):
            values.setdefault(step, []).append(value)
    return values


def draw(title: str, curves: Sequence[Curve], *, powers_of_two: bool = False) -> str:
    """Return an SVG of curves over steps, or '' if none has a point; `powers_of_two` draws a logarithmic axis to that base.

    The line of a variant bears the id ``curve-<name>``.
    """
    shown = {curve.name: values_by_step(curve) for curve in curves}
    if not any(shown.values()):
        return ""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_prop_cycle(color=COLOURS * 3, linestyle=STYLES)
    for name, values in shown.items():
        (line,) = axes.plot(list(values), [*map(fmean, values.values())], label=name, gid=f"curve-{name}")
        low, high = ([*map(end, values.values())] for end in (min, max))
        axes.fill_between(list(values), low, high, color=line.get_color(), alpha=0.18, linewidth=0)
    if powers_of_two:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"2^{math.log2(value):g}")
    axes.set_title(title, loc="left")
    axes.set_xlabel("optimizer step", loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    svg = io.StringIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(svg, format="svg", metadata={"Title": title, "Date": None})
    return svg.getvalue()[svg.getvalue().index("<svg") :]
