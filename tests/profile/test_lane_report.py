"""The section of a pipeline: its picture, to scale and alone, and its tables."""

import re
from xml.etree import ElementTree

from titan_moe.plan.pipeline.action import Action, Pair
from titan_moe.plan.pipeline.schedules import actions_of
from titan_moe.plan.pipeline.simulation import Run, Simulation, Times, simulate
from titan_moe.profile.lane_chart import COLOURS, LANE, LEFT, RIGHT, draw_lanes
from titan_moe.profile.lane_report import describe_lanes

SVG = "{http://www.w3.org/2000/svg}"
MEASURED = Simulation(
    [
        [Run(0, Action("forward", 0, 0), 0, 10), Run(0, Action("backward", 0, 0), 70, 100)],
        [Run(1, Action("forward", 1, 0), 20, 40), Run(1, Action("backward", 1, 0), 40, 60)],
    ]
)


def boxes(svg: str) -> dict[str, tuple[float, float, float, str]]:
    """Title -> left, width, top and colour of each box."""
    found = {}
    for box in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if (title := box.find(f"{SVG}title")) is not None:
            found[title.text] = (*(float(box.attrib[name]) for name in ("x", "width", "y")), box.attrib["fill"])
    return found


def test_lanes_are_drawn_to_scale() -> None:
    found = boxes(draw_lanes({"<one>": MEASURED}))
    width = RIGHT - LEFT
    left, size, top, colour = found["backward of stage 0, microbatch 0, 30 ms"]
    assert abs(left - (LEFT + 0.7 * width)) < 0.1 and abs(size - 0.3 * width) < 0.1
    assert colour == COLOURS["backward"][0] != found["forward of stage 0, microbatch 0, 10 ms"][3]
    assert len(found) == 4 and len({box[2] for box in found.values()}) == 2
    assert found["forward of stage 1, microbatch 0, 20 ms"][2] > top, "ranks are below each other"


def test_lanes_of_a_v_have_both_stages_of_a_rank() -> None:
    actions = actions_of("zbv", 2, 2, 4)
    found = boxes(draw_lanes({"zbv": simulate(actions, Times.unit(4))}, unit=""))
    assert len(found) == sum(not action.is_message for of_rank in actions for action in of_rank)
    first, last = (found[f"forward of stage {stage}, microbatch 0"] for stage in (0, 3))
    assert first[2] == last[2] and first[3] != last[3], "one lane, in two shades"


def test_lanes_of_pairs_are_one_above_the_other() -> None:
    pair = Pair(Action("forward", 0, 4), Action("backward", 3, 2))
    lanes = Simulation([[Run(0, Action("forward", 3, 1), 0, 10), Run(0, pair, 10, 30)], []])
    found = boxes(draw_lanes({"pairs": lanes}))
    forward, backward = (
        found[f"{name}, 20 ms"] for name in ("forward of stage 0, microbatch 4", "backward of stage 3, microbatch 2")
    )
    assert forward[:2] == backward[:2] and backward[2] == forward[2] + LANE / 2 and len(found) == 3
    assert ">gradients of" not in draw_lanes({"pairs": lanes})


def test_pipeline_section_has_the_times_of_pairs() -> None:
    lanes = simulate(
        actions_of("dualpipev", 1, 2, 3, has_pairs=True), Times.unit(2)._replace(pairs={(0, 1): 2.0, (1, 0): 2.5})
    )
    rows = re.findall(r"<tr>(<td>.*?)</tr>", describe_lanes(lanes, lanes))
    of_rank, *_, first, second = (re.findall("<td>(.*?)</td>", row) for row in rows)
    assert of_rank[:2] == ["0", "0, 1"]
    assert (first, second) == (["0", "1", "2.000"], ["1", "0", "2.500"])


def test_pipeline_section_has_bubbles_and_tables() -> None:
    planned = simulate(actions_of("1f1b", 2, 1, 3), Times.unit(2))
    html = describe_lanes(MEASURED, planned)
    assert planned.bubble_share == 0.25
    assert "Ranks wait 60.0 % of it" in html and "25.0 % by the plan" in html
    assert "is 50.0 % if every action takes the mean" in html, "10 + 20 + 20 + 30 ms one after the other, on two ranks"
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", html)]
    assert rows == [
        ["0", "0", "40.0 %", "0.0 %", "60.0 %", "0.0 %", "60.0 %"],
        ["1", "1", "40.0 %", "20.0 %", "0.0 %", "40.0 %", "60.0 %"],
        ["0", "10.000", "30.000", "", "", "1"],
        ["1", "20.000", "20.000", "", "", "1"],
    ]
    assert not re.search(r"<script|href=|src=|<link|url\(", html)
