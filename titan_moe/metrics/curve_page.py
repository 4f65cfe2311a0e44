"""The page of a comparison: curves and the table, one HTML file without external resources.

Runs are hidden, and steps are changed for tokens, by CSS alone. The script shows values under the pointer. Does not
import torch.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from html import escape
from operator import methodcaller
from typing import NamedTuple

from titan_moe.metrics.line_chart import Curve, line_chart
from titan_moe.metrics.run_records import Record, RunRecords
from titan_moe.profile.chart import PALETTE
from titan_moe.profile.page import page
from titan_moe.profile.table import table

STYLE = """
svg path{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
.runs{position:sticky;top:0;background:#fff;padding:.5em 0;display:flex;flex-wrap:wrap;gap:.2em 1.2em;z-index:1}
.runs label,.over label{cursor:pointer} output{display:block;min-height:1.45em;color:#555}
body:has(#over-steps:checked) .by-tokens,body:has(#over-tokens:checked) .by-steps{display:none}
"""
SCRIPT = """
for (const chart of document.querySelectorAll('svg[data-x]')) {
  const [first, last, left, right] = chart.dataset.x.split(',').map(Number);
  const said = chart.parentElement.querySelector('output');
  const curves = [...chart.querySelectorAll('path')].map(path => ({
    path, points: path.dataset.points.split(';').map(point => point.split(',').map(Number)),
  }));
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width - left) / (right - left);
    const x = first + Math.min(Math.max(share, 0), 1) * (last - first);
    const words = curves.filter(curve => getComputedStyle(curve.path).display !== 'none').map(curve => {
      const near = curve.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
      return curve.path.dataset.run + ' ' + near[1] + ' at ' + near[0].toLocaleString('en');
    });
    said.textContent = words.length ? chart.dataset.unit + ': ' + words.join(', ') : '';
  });
}
"""


class Quantity(NamedTuple):
    """What a chart shows of records."""

    title: str
    of: Callable[[Record], object]
    """Its number; None where a record has none."""
    leaves_out_start: bool = True
    of_validations: bool = False


def _largest(table: object) -> float | None:
    values = table.values() if isinstance(table, dict) else ()
    return max((value for value in values if value is not None), default=None)


QUANTITIES = (
    Quantity("Loss", lambda record: record["loss"]),
    Quantity("Validation loss", lambda record: record["validation_loss"], of_validations=True),
    Quantity("Learning rate", lambda record: record.get("lr"), leaves_out_start=False),
    Quantity("Gradient norm", lambda record: record.get("grad_norm")),
    Quantity("Tokens/s of a GPU", lambda record: record.get("tokens_per_second_per_gpu")),
    Quantity("Peak memory, GiB", lambda record: record.get("memory_gib"), leaves_out_start=False),
    Quantity("Busiest expert over the mean, of the worst layer", lambda record: _largest(record.get("expert_load"))),
    Quantity("Busiest rank over the mean, of the worst layer", lambda record: _largest(record.get("overload"))),
)


def render(runs: Sequence[RunRecords], rows: Sequence[Sequence[str]]) -> str:
    """The page of some runs, with the rows of their table, the first of them its heading."""
    title = f"Runs: {', '.join(run.name for run in runs)}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        '<p class="note">The axis of a quantity leaves out the first tenth of the longest run, where losses and speeds '
        "differ most. Curves of many points keep the lowest and the highest of each interval.</p>",
        _choices(runs),
        *(_section(quantity, runs) for quantity in (*QUANTITIES[:2], *_of_sets(runs), *QUANTITIES[2:])),
        f"<h2>Table</h2>{table(rows[0], rows[1:])}",
        f"<script>{SCRIPT}</script>",
    ]
    colours = "".join(
        f".run-{number}{{stroke:{_colour(number)}}}body:has(#show-{number}:not(:checked)) .run-{number}{{display:none}}"
        for number in range(len(runs))
    )
    return page(title, sections, STYLE + colours)


def _choices(runs: Sequence[RunRecords]) -> str:
    """Which runs are shown, which is the legend too, and over what."""
    shown = "".join(
        f'<label><input type="checkbox" id="show-{number}" checked><i style="background:{_colour(number)}"></i>'
        f"{escape(run.name)}</label>"
        for number, run in enumerate(runs)
    )
    over = "".join(
        f'<label><input type="radio" name="over" id="over-{unit}"{" checked" * (unit == "steps")}> {unit}</label>'
        for unit in ("steps", "tokens")
    )
    return f'<div class="runs">{shown}<span class="over">over {over}</span></div>'


def _of_sets(runs: Sequence[RunRecords]) -> list[Quantity]:
    """A chart for each set of validation data."""
    records = [record for run in runs for record in run.validations]
    names = {name for record in records for name in record if name.startswith("validation_loss/")}
    return [
        Quantity(f"Validation loss, {name.partition('/')[2]}", methodcaller("get", name), of_validations=True)
        for name in sorted(names)
    ]


def _section(quantity: Quantity, runs: Sequence[RunRecords]) -> str:
    """A chart over steps and one over tokens, of which one is shown; empty if no run has a number."""
    charts = []
    for unit in ("steps", "tokens"):
        curves = []
        for number, run in enumerate(runs):
            points = _points(quantity, run, unit)
            if any(y is not None for _, y in points):
                curves.append(Curve(run.name, number, points))
        if curves:
            chart = line_chart(curves, unit_x=unit, leaves_out_start=quantity.leaves_out_start)
            charts.append(f'<div class="by-{unit}">{chart}<output></output></div>')
    return f"<h2>{escape(quantity.title)}</h2>{''.join(charts)}" if charts else ""


def _points(quantity: Quantity, run: RunRecords, unit: str) -> list[tuple[float, float | None]]:
    records = run.validations if quantity.of_validations else run.steps
    points: list[tuple[float, float | None]] = []
    for record in records:
        x = record["step"] if unit == "steps" else _tokens_at(record["step"], run.steps)
        y = quantity.of(record)
        if x is not None:
            points.append((x, float(y) if isinstance(y, (int, float)) else None))
    return points


def _tokens_at(step: int, steps: Sequence[Record]) -> float | None:
    """Tokens of the steps up to one, of which there may be no record; None where records do not say."""
    place = min(bisect_left(steps, step, key=lambda record: record["step"]), len(steps) - 1)
    if not steps or (tokens := steps[place].get("tokens_seen")) is None:
        return None
    return tokens * step / steps[place]["step"] if steps[place]["step"] else tokens


def _colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]
