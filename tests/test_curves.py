"""Curves of a comparison as SVG."""

import math
from xml.etree import ElementTree

import pytest

from tasks.curves import Curve, bands, draw, ticks

SVG = "{http://www.w3.org/2000/svg}"


def test_a_band_reaches_over_the_seeds_and_leaves_out_what_is_not_finite() -> None:
    seeds = [[(1.0, 1.0), (2.0, math.nan)], [(1.0, 3.0), (2.0, 5.0)], [(3.0, math.inf)]]
    assert bands(Curve("a", seeds)) == [(1.0, 1.0, 2.0, 3.0), (2.0, 5.0, 5.0, 5.0)]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3e-9, 7e-9), (12.3, 9_876.5), (5, 5)])
def test_ticks_are_round_and_lie_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * abs(high) for tick in found)


def test_each_variant_is_a_line_in_a_band_and_names_are_escaped() -> None:
    curves = [Curve("<b>&", [[(1, 0.0), (2, 1.0)], [(1, 1.0), (2, 2.0)]]), Curve("flat", [[(1, 5.0), (2, 5.0)]])]
    root = ElementTree.fromstring(draw("reward <i>", curves))
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == len(root.findall(f"{SVG}polygon")) == 2
    assert {"<b>&", "flat", "reward <i>"} <= {text.text for text in root.findall(f"{SVG}text")}
    points = [tuple(map(float, point.split(","))) for point in lines[0].get("points", "").split()]
    # to the right in time, and a larger value lies higher, which is a smaller y
    assert points[0][0] < points[1][0] and points[0][1] > points[1][1]


def test_scales_are_drawn_as_powers_of_two_and_no_point_is_no_curve() -> None:
    drawn = draw("scale", [Curve("fp16", [[(1, 65536.0), (2, 32768.0)]])], powers_of_two=True)
    assert "2^16" in drawn and "2^15" in drawn
    assert draw("reward", [Curve("a", [[]]), Curve("b", [[(1, math.nan)]])]) == ""


def test_the_legend_names_the_variants_from_left_to_right_and_none_over_another() -> None:
    names = ["bf16", "fp16-with-an-fp32-head", "fp32", "lora-16", "lora-16-compact-allocator", "b"]
    root = ElementTree.fromstring(draw("t", [Curve(name, [[(1, 0.0), (2, 1.0)]]) for name in names]))
    places = {text.text: (float(text.get("y", "")), float(text.get("x", ""))) for text in root.findall(f"{SVG}text")}
    found = [places[name] for name in names]
    assert found == sorted(found) and len({row for row, _ in found}) > 1
    for name, (row, left), (next_row, next_left) in zip(names, found, found[1:], strict=False):
        assert next_row > row or next_left >= left + 6 * len(name)
