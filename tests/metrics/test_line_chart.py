"""Charts of curves: what is drawn where."""

import re
from xml.etree import ElementTree

from titan_moe.metrics.line_chart import Curve, Point, line_chart
from titan_moe.profile.chart import BOTTOM, LEFT, RIGHT, TOP


def pixels(*curves: list[Point], leaves_out_start: bool = False) -> list[list[tuple[float, float]]]:
    """Where the points of each curve are."""
    drawn = line_chart(
        [Curve("a<b", number, points) for number, points in enumerate(curves)],
        unit_x="steps",
        leaves_out_start=leaves_out_start,
    )
    paths = [element.attrib["d"] for element in ElementTree.fromstring(drawn).iter("path")]
    return [[(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.-]+) ([\d.-]+)", path)] for path in paths]


def test_curves_share_their_axes() -> None:
    low, high = pixels([(0, 1.0), (10, 2.0)], [(5, 3.0)])
    assert [x for x, _ in low] == [LEFT, RIGHT] and high[0][0] == (LEFT + RIGHT) / 2
    assert BOTTOM > low[0][1] > low[1][1] > high[0][1] > TOP, "larger is higher"
    assert len(high) == 2, "a single point is a dot: a line of no length"


def test_a_gap_begins_a_new_line() -> None:
    drawn = line_chart([Curve("a", 0, [(1, 1.0), (2, None), (3, 1.0)])], unit_x="steps", leaves_out_start=False)
    assert drawn.count("M") == 2 and 'data-points="1,1;3,1"' in drawn


def test_the_start_may_be_outside() -> None:
    curve: list[Point] = [(1, 100.0), (50, 2.0), (100, 1.0)]
    (whole,), (cut,) = pixels(curve), pixels(curve, leaves_out_start=True)
    assert whole[0][1] > TOP > cut[0][1] and whole[1][1] - cut[1][1] > 100


def test_a_constant_has_a_range_too() -> None:
    assert pixels([(1, 0.0), (2, 0.0)]) and pixels([(1, 5.0)], leaves_out_start=True)
