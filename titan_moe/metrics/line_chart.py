"""A chart of curves in SVG, one for each run, over steps or tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from titan_moe.profile.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, downsample

START = 0.1
"""Share of the longest curve whose values do not decide the range of the axis, where the start of runs is left out."""
MARGIN = 0.05
NUM_TICKS = 5

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Curve:
    """Values of a run. None is a gap."""

    name: str
    number: int
    """Of the run, in the page; the curve has the class `run-NUMBER`."""
    points: Sequence[Point]


def line_chart(curves: Sequence[Curve], *, unit_x: str, leaves_out_start: bool) -> str:
    """Draw curves with at least one value. With `leaves_out_start` the axis is that of later values, and what is
    outside is cut: a first loss, or a first step that compiles."""
    values = [(x, y) for curve in curves for x, y in curve.points if y is not None]
    first_x, last_x = min(x for x, _ in values), max(x for x, _ in values)
    later = [y for x, y in values if x >= first_x + START * (last_x - first_x)]
    in_range = later if leaves_out_start and len(set(later)) > 1 else [y for _, y in values]
    low, high = min(in_range), max(in_range)
    edge = MARGIN * (high - low) or MARGIN * abs(high) or 1.0
    low, high = (0.0 if low >= 0 > low - edge else low - edge), high + edge

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        x_share, y_share = (x - first_x) / (last_x - first_x or 1.0), (y - low) / (high - low)
        y_px = min(max(BOTTOM - y_share * (BOTTOM - TOP), -HEIGHT), 2 * HEIGHT)  # far outside, the angle matters little
        return LEFT + x_share * (RIGHT - LEFT), y_px

    grid = []
    for tick in range(NUM_TICKS):
        y = low + (high - low) * tick / (NUM_TICKS - 1)
        y_px = to_pixels(first_x, y)[1]
        grid.append(f'<text x="{LEFT - 6}" y="{y_px + 4:.1f}" text-anchor="end">{y:,.4g}</text>')
        grid.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y_px:.1f}" y2="{y_px:.1f}"/>')
    drawn = []
    for curve in curves:
        parts = [downsample(part) for part in _without_gaps(curve.points)]
        path = " ".join(_path([to_pixels(x, y) for x, y in part]) for part in parts)
        known = ";".join(f"{x:.6g},{y:.6g}" for part in parts for x, y in part)
        name = escape(curve.name, quote=True)
        drawn.append(f'<path class="run-{curve.number}" data-run="{name}" data-points="{known}" d="{path}"/>')
    x_axis = (
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{first_x:,.6g} {escape(unit_x)}</text>'
        f'<text x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{last_x:,.6g} {escape(unit_x)}</text>'
    )
    scale = f'data-x="{first_x:.6g},{last_x:.6g},{LEFT / WIDTH:.4f},{RIGHT / WIDTH:.4f}" data-unit="{escape(unit_x)}"'
    drawing = f'<svg x="0" y="{TOP - 2}" width="{WIDTH}" height="{BOTTOM - TOP + 4}" '
    drawing += f'viewBox="0 {TOP - 2} {WIDTH} {BOTTOM - TOP + 4}">{"".join(drawn)}</svg>'  # which cuts what is outside
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" {scale}>{"".join(grid)}{drawing}{x_axis}</svg>'


def _without_gaps(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The parts of a curve between its gaps."""
    parts = groupby(points, key=lambda point: point[1] is None)
    return [[(x, y) for x, y in part if y is not None] for is_gap, part in parts if not is_gap]


def _path(pixels: Sequence[tuple[float, float]]) -> str:
    """A line, or a dot for a single point: a line of no length with round ends."""
    ends = [*pixels, pixels[-1]] if len(pixels) == 1 else pixels
    return "".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(ends))
