"""Whether replica slots are used follows the imbalance of steps."""

import pytest

from titan_moe.config.clones import PAYS_FROM
from titan_moe.training.clone_control import STEPS_BETWEEN_CHANGES, WINDOW_STEPS, CloneControl


def run(control: CloneControl, *phases: tuple[int, float]) -> list[bool]:
    """Whether they are used after each step of some phases, each a number of steps of one imbalance."""
    imbalances = (imbalance for num_steps, imbalance in phases for _ in range(num_steps))
    return [control.follow({"imbalance": imbalance}).uses_clones for imbalance in imbalances]


def test_control_waits_for_a_whole_window() -> None:
    assert run(CloneControl(PAYS_FROM), (WINDOW_STEPS, 1.5)) == [False] * (WINDOW_STEPS - 1) + [True]


def test_control_follows_the_mean_of_a_window() -> None:
    """Every eighth step is routed to one of two ranks; 1.0625 on average, and not 1.125."""
    for peak, are_used in ((1.5, False), (2.0, True)):
        assert run(CloneControl(PAYS_FROM), *[(7, 1.0), (1, peak)] * 8)[-1] is are_used


@pytest.mark.parametrize(("imbalance", "was_used"), [(1.07, False), (1.07, True), (1.1, False), (1.06, True)])
def test_control_changes_nothing_between_its_thresholds(imbalance: float, was_used: bool) -> None:
    control = CloneControl(PAYS_FROM)
    run(control, (WINDOW_STEPS, 1.5 if was_used else 1.0))
    assert set(run(control, (10 * STEPS_BETWEEN_CHANGES, imbalance))[WINDOW_STEPS:]) == {was_used}


def test_control_uses_clones_from_where_they_pay() -> None:
    for imbalance, are_used in ((1.25, False), (1.27, True)):
        assert run(CloneControl(1.26), (WINDOW_STEPS, imbalance))[-1] is are_used
    later = run(CloneControl(1.26), (2 * STEPS_BETWEEN_CHANGES, 1.3), (WINDOW_STEPS, 1.22), (WINDOW_STEPS, 1.2))
    assert later[-WINDOW_STEPS - 1] and not later[-1]


def test_control_takes_its_time_between_changes() -> None:
    """A load that comes and goes changes it once in so many steps at most."""
    used = run(CloneControl(PAYS_FROM), *[(WINDOW_STEPS, 1.5), (WINDOW_STEPS, 1.0)] * 50)
    changes = [step for step in range(1, len(used)) if used[step] != used[step - 1]]
    assert len(changes) > 2 and min(b - a for a, b in zip(changes, changes[1:], strict=False)) >= STEPS_BETWEEN_CHANGES


def test_control_goes_off_and_on_again() -> None:
    control = CloneControl(PAYS_FROM)
    assert run(control, (2 * STEPS_BETWEEN_CHANGES, 1.3))[-1]
    later = run(control, (WINDOW_STEPS, 1.0), (STEPS_BETWEEN_CHANGES, 1.3))
    off = later.index(False)
    assert off < WINDOW_STEPS, "the last change was long ago"
    assert later[off:].index(True) == STEPS_BETWEEN_CHANGES


def test_control_goes_on_with_the_state_of_an_earlier_run() -> None:
    whole, first, second = (CloneControl(PAYS_FROM) for _ in range(3))
    phases = (WINDOW_STEPS + 3, 1.5), (STEPS_BETWEEN_CHANGES + 7, 1.0), (STEPS_BETWEEN_CHANGES, 1.4)
    expected = run(whole, *phases)
    actual = run(first, phases[0])
    second.load_state_dict(CloneControl(1.5).state_dict())
    assert second.pays_from == PAYS_FROM, "the state of a run with other thresholds"
    second.load_state_dict(first.state_dict())
    assert actual + run(second, *phases[1:]) == expected and len(set(expected)) == 2
