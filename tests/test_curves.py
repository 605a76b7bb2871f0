"""Curves of a comparison as SVG."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

from tasks.curves import Curve, draw, values_by_step

SVG = "{http://www.w3.org/2000/svg}"


def line_of(root: ElementTree.Element, name: str) -> list[tuple[float, float]]:
    """Return the points of a drawn line, in the picture's own coordinates: y grows downwards."""
    path = root.find(f".//{SVG}g[@id='curve-{name}']/{SVG}path")
    assert path is not None
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path.get("d", ""))]


def test_values_are_those_of_all_seeds_and_what_is_not_finite_is_left_out() -> None:
    seeds = [[(2.0, math.nan), (1.0, 1.0)], [(1.0, 3.0), (2.0, 5.0)], [(3.0, math.inf)]]
    assert list(values_by_step(Curve("a", seeds)).items()) == [(1.0, [1.0, 3.0]), (2.0, [5.0])]


def test_each_variant_is_a_line_in_a_band_and_names_are_escaped() -> None:
    curves = [Curve("<b>&", [[(1, 0.0), (2, 1.0)], [(1, 1.0), (2, 2.0)]]), Curve("flat", [[(1, 5.0), (2, 5.0)]])]
    root = ElementTree.fromstring(draw("reward <i>", curves))
    assert {"<b>&", "flat", "reward <i>"} <= {text.text for text in root.iter(f"{SVG}text")}
    (left, low), (right, high) = line_of(root, "<b>&")
    assert left < right and low > high
    bands = [group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("FillBetween")]
    assert len(bands) == 2 and all(band.find(f".//{SVG}path") is not None for band in bands)


def test_scales_are_drawn_as_powers_of_two_and_no_point_is_no_curve() -> None:
    drawn = draw("scale", [Curve("fp16", [[(1, 65536.0), (2, 32768.0), (3, 16384.0)]])], powers_of_two=True)
    assert "2^16" in drawn and "2^15" in drawn
    (_, first), (_, second), (_, third) = line_of(ElementTree.fromstring(drawn), "fp16")
    assert math.isclose(second - first, third - second, rel_tol=1e-3)
    assert draw("reward", [Curve("a", [[]]), Curve("b", [[(1, math.nan)]])]) == ""


def test_a_drawing_loads_nothing_and_is_the_same_bytes_again() -> None:
    curves = [Curve("a", [[(1, 0.0), (2, 1.0)]])]
    drawn = draw("t", curves)
    assert drawn == draw("t", curves) and drawn.startswith("<svg")
    links = [value for element in ElementTree.fromstring(drawn).iter() for name, value in element.items() if name.endswith("href")]
    assert links and all(link.startswith("#") for link in links) and "url(http" not in drawn


def test_the_legend_names_the_variants_in_their_order_and_none_over_another() -> None:
    names = ["bf16", "fp16-with-an-fp32-head", "fp32", "lora-16", "lora-16-compact-allocator", "b"]
    root = ElementTree.fromstring(draw("t", [Curve(name, [[(1, 0.0), (2, 1.0)]]) for name in names]))
    texts = {text.text: text.get("transform", "") + text.get("y", "") for text in root.iter(f"{SVG}text")}
    heights = [float(re.findall(r"[\d.]+", texts[name])[-1]) for name in names]
    assert all(lower - higher > 10 for higher, lower in pairwise(heights))
