"""The lanes of a pipeline as a picture: a row a rank, a box an action with the number of its microbatch. The
two of a pair are one above the other."""

from collections.abc import Iterator, Mapping
from html import escape

from titan_moe.plan.pipeline.action import Action, actions_in
from titan_moe.plan.pipeline.simulation import Run, Simulation
from titan_moe.profile.chart import WIDTH

COLOURS = {
    "forward": ("#4e79a7", "F"),
    "backward": ("#59a14f", "B"),
    "backward_input": ("#8cd17d", "gradients of activations"),
    "backward_weight": ("#f28e2b", "gradients of weights"),
}
"""Kind -> colour, name in the legend. The later a rank's stage, the darker."""
SHADES = (1.0, 0.72, 0.55, 0.42)
LEFT, RIGHT = 60, WIDTH - 8
LANE, GAP, TITLE, FOOT = 22, 4, 22, 20
"""Heights: of a lane, between two of them, of a title above lanes, of the axis below."""
PIXELS_OF_A_DIGIT = 7


def draw_lanes(panels: Mapping[str, Simulation], unit: str = "ms") -> str:
    """Draw lanes below each other, each panel to its own scale, as an SVG that stands alone. Only times of the first
    panel have the unit."""
    parts: list[str] = []
    top = 24.0
    for number, (title, lanes) in enumerate(panels.items()):
        parts += _panel(title, lanes, top, unit if number == 0 else "")
        top += TITLE + len(lanes.runs) * (LANE + GAP) + FOOT
    every = (run for lanes in panels.values() for runs in lanes.runs for run in runs)
    kinds = {action.kind for run in every for action in actions_in(run.action)}
    parts += _legend([kind for kind in COLOURS if kind in kinds])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def _legend(kinds: list[str]) -> Iterator[str]:
    x = LEFT
    for kind in kinds:
        colour, name = COLOURS[kind]
        yield f'<rect x="{x}" y="6" width="11" height="11" fill="{colour}"/><text x="{x + 16}" y="15">{name}</text>'
        x += 34 + PIXELS_OF_A_DIGIT * len(name)


def _panel(title: str, lanes: Simulation, top: float, unit: str) -> Iterator[str]:
    yield f'<text x="{LEFT}" y="{top + 14:.0f}" font-weight="bold">{escape(title)}</text>'
    scale = (RIGHT - LEFT) / (lanes.makespan or 1.0)
    for rank, runs in enumerate(lanes.runs):
        y = top + TITLE + rank * (LANE + GAP)
        yield f'<text x="{LEFT - 6}" y="{y + 15:.0f}" text-anchor="end">rank {rank}</text>'
        yield f'<rect x="{LEFT}" y="{y:.0f}" width="{RIGHT - LEFT}" height="{LANE}" fill="#eee"/>'
        stages = sorted({action.stage for run in runs for action in actions_in(run.action)})
        for run in runs:
            actions = actions_in(run.action) if run.end > run.start else ()
            height = LANE / max(len(actions), 1)
            for number, action in enumerate(actions):
                top_of_box = y + number * height
                yield _box(run, action, stages.index(action.stage), scale, top_of_box, height, unit)
    if unit:
        y = top + TITLE + len(lanes.runs) * (LANE + GAP) + 10
        yield f'<text x="{LEFT}" y="{y:.0f}">0 {unit}</text>'
        yield f'<text x="{RIGHT}" y="{y:.0f}" text-anchor="end">{lanes.makespan:.4g} {unit}</text>'


def _box(run: Run, action: Action, turn: int, scale: float, y: float, height: float, unit: str) -> str:
    x, width = LEFT + run.start * scale, (run.end - run.start) * scale
    fill = _darker(COLOURS[action.kind][0], SHADES[min(turn, len(SHADES) - 1)])
    time = f", {run.end - run.start:.4g} {unit}" if unit else ""
    title = f"{action.kind.replace('_', ' ')} of stage {action.stage}, microbatch {action.microbatch}{time}"
    text, number = "", str(action.microbatch)
    if width > PIXELS_OF_A_DIGIT * len(number):
        at = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.0f}"'
        text = f'<text {at} text-anchor="middle" style="fill:white">{number}</text>'
    box = f'<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height:.0f}" fill="{fill}" stroke="white" '
    return f'{box}stroke-width="0.5"><title>{title}</title></rect>{text}'


def _darker(colour: str, share: float) -> str:
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(share * channel):02x}" for channel in channels)
