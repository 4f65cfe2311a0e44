"""The page of curves."""

import re
import shutil
import subprocess
from typing import Any

import pytest

from titan_moe.metrics.curve_page import SCRIPT, render
from titan_moe.metrics.run_records import RunRecords


def record(step: int, **others: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0 - step, "tokens_seen": 100 * step, "lr": None, **others}


RUNS = [
    RunRecords("<one>", [record(1), record(2)], [{"step": 2, "validation_loss": 4.0, "validation_loss/code": 3.0}], {}),
    RunRecords("two", [record(2, expert_load={"layers.0": 1.5}), record(4)], [], {}),
    RunRecords("new", [], [{"step": 2, "validation_loss": 4.0}], {}),
]


def test_page_has_a_chart_of_each_quantity_over_steps_and_tokens() -> None:
    html = render(RUNS, [["", "a"], ["steps", "<4>"]])
    titles = re.findall("<h2>(.*?)</h2>", html)
    assert titles[:3] == ["Loss", "Validation loss", "Validation loss, code"]
    assert titles[3:] == ["Busiest expert over the mean, of the worst layer", "Table"], "the others have no numbers"
    points = re.findall(r'class="run-(\d)" data-run="([^"]*)" data-points="([^"]*)"', html)
    assert points[:4] == [
        ("0", "&lt;one&gt;", "1,4;2,3"), ("1", "two", "2,3;4,1"),
        ("0", "&lt;one&gt;", "100,4;200,3"), ("1", "two", "200,3;400,1"),
    ]  # fmt: skip
    assert points[4:7] == [("0", "&lt;one&gt;", "2,4"), ("2", "new", "2,4"), ("0", "&lt;one&gt;", "200,4")]
    assert "&lt;4&gt;" in html and "<one>" not in html


def test_page_needs_nothing_outside() -> None:
    html = render(RUNS, [["", "a"]])
    assert not re.search(r"https?:|src=|href=|@import|url\(", html)
    assert html.count('type="checkbox"') == 3 and html.count('type="radio"') == 2
    assert render([RUNS[2]], [["", "a"]]).count("<h2>") == 2, "also of a run without steps"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_shows_the_nearest_value() -> None:
    """With a stand-in for a page that has one chart of one curve."""
    page = """
    const path = {dataset: {run: 'a', points: '1,4;2,3;9,1'}}, said = {}, listeners = {};
    const chart = {
      dataset: {x: '1,9,0.1,0.9', unit: 'steps'}, parentElement: {querySelector: () => said},
      querySelectorAll: () => [path], getBoundingClientRect: () => ({left: 10, width: 100}),
      addEventListener: (name, listener) => { listeners[name] = listener; },
    };
    globalThis.document = {querySelectorAll: () => [chart]};
    globalThis.getComputedStyle = () => ({display: 'inline'});
    """
    moves = "for (const clientX of [0, 31, 200]) { listeners.pointermove({clientX}); console.log(said.textContent); }"
    done = subprocess.run(["node", "-e", page + SCRIPT + moves], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["steps: a 4 at 1", "steps: a 3 at 2", "steps: a 1 at 9"], done.stderr
