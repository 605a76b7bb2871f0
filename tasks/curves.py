"""Draw curves as SVG: a line for each variant, the mean over its seeds, in a band from the least to the largest of them. Pure."""

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 260, 64, 12, 28, 34
LEGEND = 390  # where the longest title has ended
# Okabe and Ito's, told apart by people who see colours otherwise; dashes follow where they run out
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("", "6 3", "2 2")
Points = Sequence[tuple[float, float]]


class Curve(NamedTuple):
    """One variant: its (step, value) points, a sequence a seed. What is not finite is left out."""

    name: str
    seeds: Sequence[Points]


class Band(NamedTuple):
    """What the seeds say at one step."""

    step: float
    low: float
    mean: float
    high: float


def bands(curve: Curve) -> list[Band]:
    """Return least, mean and largest value over the seeds at each step that any of them has."""
    values: dict[float, list[float]] = {}
    for points in curve.seeds:
        for step, value in points:
            if math.isfinite(value):
                values.setdefault(step, []).append(value)
    return [Band(step, min(found), fmean(found), max(found)) for step, found in sorted(values.items())]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return about `wanted` round numbers within [low, high]."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / wanted))
    distance = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= wanted)
    return [number * distance for number in range(math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9) + 1)]


def draw(title: str, curves: Sequence[Curve], *, powers_of_two: bool = False) -> str:
    """Return an SVG of curves over steps, or '' if none has a point; `powers_of_two` draws the logarithm to that base."""
    shown = [(curve.name, bands(curve)) for curve in curves]
    if powers_of_two:
        shown = [(name, [Band(at.step, *map(math.log2, (at.low, at.mean, at.high))) for at in line if at.low > 0]) for name, line in shown]
    every = [at for _, line in shown for at in line]
    if not every:
        return ""
    x, x_ticks = _axis([at.step for at in every], LEFT, WIDTH - RIGHT)
    y, y_ticks = _axis([value for at in every for value in at[1:]], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<text x="{LEFT}" y="14" font-size="13" font-weight="bold">{escape(title)}</text>',
    ]
    for value, at in y_ticks:
        label = f"2^{value:g}" if powers_of_two else f"{value:.6g}"
        parts.append(f'<path d="M{LEFT} {at}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for value, at in x_ticks:
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">optimizer step</text>')
    places = _legend([name for name, _ in shown])
    for index, (name, line) in enumerate(shown):
        parts += _curve(index, name, places[index], [(x(at.step), y(at.low), y(at.mean), y(at.high)) for at in line])
    return "\n".join([*parts, "</svg>"])


def _axis(values: list[float], start: float, end: float) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
    low, high = min(values), max(values)
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
        low, high = low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05

    def place(value: float) -> float:
        return round(start + (value - low) / (high - low) * (end - start), 1)

    return place, [(value, place(value)) for value in ticks(low, high)]


def _legend(names: list[str]) -> list[tuple[int, int]]:
    """Return where each name stands, from left to right beside the title, in further rows where one is full."""
    places, at, row = [], LEGEND, 14
    for name in names:
        width = 34 + 6 * len(name)
        if at > LEGEND and at + width > WIDTH:
            at, row = LEGEND, row + 12
        places.append((at, row))
        at += width
    return places


def _curve(index: int, name: str, place: tuple[int, int], line: list[tuple[float, float, float, float]]) -> list[str]:
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
    edge = [f"{x},{low}" for x, low, _, _ in line] + [f"{x},{high}" for x, _, _, high in reversed(line)]
    middle = " ".join(f"{x},{mean}" for x, _, mean, _ in line)
    style = f'stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}"' if dash else f'stroke="{colour}" stroke-width="1.6"'
    at, row = place
    return [
        f'<polygon points="{" ".join(edge)}" fill="{colour}" fill-opacity="0.18"/>',
        f'<polyline points="{middle}" fill="none" {style}/>',
        f'<path d="M{at} {row - 4}h16" {style}/>',
        f'<text x="{at + 20}" y="{row}">{escape(name)}</text>',
    ]
