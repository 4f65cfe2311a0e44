"""Charts of the report: bars in HTML, curves in SVG."""

from collections.abc import Sequence
from html import escape

PALETTE = (
    "#4e79a7 #59a14f #f28e2b #e15759 #edc948 #76b7b2 #b07aa1 #9c755f #ff9da7 #86bcb6 #8cd17d #d4a6c8 #a0cbe8 #ffbe7d "
    "#d37295 #d7b5a6 #999999 #6b8e8e #bab0ac"
).split()
WIDTH, HEIGHT = 960, 230
LEFT, RIGHT, TOP, BOTTOM = 100, WIDTH - 8, 28, HEIGHT - 24
"""The edges of the drawing area of a curve. Labels are in the margins around it."""
MAX_POINTS = 480


def stacked_bar(shares: Sequence[tuple[str, float, str]]) -> str:
    """Draw (label, value, colour) side by side, with widths proportional to the values, and a legend."""
    total = sum(value for _, value, _ in shares) or 1.0
    segments, legend = [], []
    for label, value, colour in shares:
        percent = 100 * value / total
        title = escape(f"{label}: {percent:.1f} %")
        segments.append(f'<span style="width:{percent:.3f}%;background:{colour}" title="{title}"></span>')
        legend.append(f'<li><i style="background:{colour}"></i>{escape(label)} <b>{percent:.1f} %</b></li>')
    return f'<div class="bar">{"".join(segments)}</div><ul class="legend">{"".join(legend)}</ul>'


def area_curve(points: Sequence[tuple[float, float]], *, unit_x: str, unit_y: str) -> str:
    """Draw a piecewise constant value as a filled area. The axis starts at zero, or at the lowest negative value. Every
    label has its unit. Labels fit into the margins: an SVG clips what is outside its view box."""
    points = downsample(points)
    first_x, last_x = points[0][0], points[-1][0]
    low = min(0.0, min(y for _, y in points))
    high = max(low + 1e-9, max(y for _, y in points))

    def to_pixels(x: float, y: float) -> tuple[float, float]:
        x_share, y_share = (x - first_x) / (last_x - first_x or 1.0), (y - low) / (high - low)
        return LEFT + x_share * (RIGHT - LEFT), BOTTOM - y_share * (BOTTOM - TOP)

    path: list[str] = []
    last_y_px: float | None = None
    for x, y in points:
        x_px, y_px = to_pixels(x, y)
        path += [f"L{x_px:.1f} {last_y_px:.1f}"] if last_y_px is not None else []
        path.append(f"{'L' if path else 'M'}{x_px:.1f} {y_px:.1f}")
        last_y_px = y_px
    zero_px = to_pixels(first_x, 0.0)[1]
    area = f"{' '.join(path)} L{RIGHT:.1f} {zero_px:.1f} L{LEFT:.1f} {zero_px:.1f} Z"
    grid = []
    for y in sorted({low, 0.0, (low + high) / 2, high}):
        y_px = to_pixels(first_x, y)[1]
        grid.append(f'<text x="{LEFT - 6}" y="{y_px + 4:.1f}" text-anchor="end">{y:.3g} {escape(unit_y)}</text>')
        grid.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y_px:.1f}" y2="{y_px:.1f}"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(grid)}<path d="{area}"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 6}">0 {escape(unit_x)}</text>'
        f'<text x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{last_x - first_x:.4g} {escape(unit_x)}</text></svg>'
    )


def downsample(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the lowest and the highest point of each interval, so that no peak is lost."""
    if len(points) <= MAX_POINTS:
        return list(points)
    stride = -(-2 * len(points) // MAX_POINTS)
    kept = []
    for first in range(0, len(points), stride):
        numbered = list(enumerate(points[first : first + stride], first))
        extremes = {extreme(numbered, key=lambda item: item[1][1]) for extreme in (min, max)}
        kept += [point for _, point in sorted(extremes)]
    return kept
