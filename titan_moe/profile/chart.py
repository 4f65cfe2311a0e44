"""The drawings of a report, as text: bars in HTML, curves in SVG."""

from collections.abc import Sequence
from html import escape

PALETTE = (
    "#4e79a7",
    "#59a14f",
    "#f28e2b",
    "#e15759",
    "#edc948",
    "#76b7b2",
    "#b07aa1",
    "#9c755f",
    "#ff9da7",
    "#86bcb6",
    "#8cd17d",
    "#d4a6c8",
    "#a0cbe8",
    "#ffbe7d",
    "#999999",
)
WIDTH, HEIGHT, MARGIN_LEFT, MARGIN_BOTTOM = 960, 220, 80, 24
MAX_POINTS = 480


def stacked_bar(shares: Sequence[tuple[str, float, str]]) -> str:
    """Draw (label, value, colour) side by side, each as wide as its value, with a legend."""
    total = sum(value for _, value, _ in shares) or 1.0
    pieces, keys = [], []
    for label, value, colour in shares:
        percent = 100 * value / total
        title = escape(f"{label}: {percent:.1f} %")
        pieces.append(f'<span style="width:{percent:.3f}%;background:{colour}" title="{title}"></span>')
        keys.append(f'<li><i style="background:{colour}"></i>{escape(label)} <b>{percent:.1f} %</b></li>')
    return f'<div class="bar">{"".join(pieces)}</div><ul class="legend">{"".join(keys)}</ul>'


def area_curve(points: Sequence[tuple[float, float]], *, unit_x: str, unit_y: str) -> str:
    """Draw a value that stays until it changes, as a filled staircase from zero (or below) up."""
    points = thinned(points)
    first_x, last_x = points[0][0], points[-1][0]
    low = min(0.0, min(y for _, y in points))
    high = max(low + 1e-9, max(y for _, y in points))
    right, bottom = WIDTH - 8, HEIGHT - MARGIN_BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        along = (x - first_x) / (last_x - first_x or 1.0)
        return MARGIN_LEFT + along * (right - MARGIN_LEFT), bottom - (y - low) / (high - low) * (bottom - 12)

    path: list[str] = []
    before: float | None = None
    for x, y in points:
        across, up = place(x, y)
        path += [f"L{across:.1f} {before:.1f}"] if before is not None else []
        path.append(f"{'L' if path else 'M'}{across:.1f} {up:.1f}")
        before = up
    ground = place(first_x, 0.0)[1]
    area = f"{' '.join(path)} L{right:.1f} {ground:.1f} L{MARGIN_LEFT:.1f} {ground:.1f} Z"
    marks = []
    for y in sorted({low, 0.0, (low + high) / 2, high}):
        up, unit = place(first_x, y)[1], escape(f" {unit_y}") if y == high else ""
        marks.append(f'<text x="{MARGIN_LEFT - 6}" y="{up + 4:.1f}" text-anchor="end">{y:.4g}{unit}</text>')
        marks.append(f'<line x1="{MARGIN_LEFT}" x2="{right}" y1="{up:.1f}" y2="{up:.1f}"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}<path d="{area}"/>'
        f'<text x="{MARGIN_LEFT}" y="{HEIGHT - 6}">0 {escape(unit_x)}</text>'
        f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{last_x - first_x:.4g} {escape(unit_x)}</text></svg>'
    )


def thinned(points: Sequence[tuple[float, float]], max_points: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Keep the lowest and the highest point of each stretch, so that no peak is lost."""
    if len(points) <= max_points:
        return list(points)
    stride = -(-2 * len(points) // max_points)
    kept = []
    for first in range(0, len(points), stride):
        numbered = list(enumerate(points[first : first + stride], first))
        extremes = {choose(numbered, key=lambda item: item[1][1]) for choose in (min, max)}
        kept += [point for _, point in sorted(extremes)]
    return kept
