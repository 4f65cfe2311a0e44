"""Ranks without a sign of life are noticed, those that have left are not."""

import time
from collections.abc import Callable

import torch.distributed as dist

from titan_moe.run.heartbeat import Heartbeat, Sign, main_thread_place

INTERVAL_S = 0.02


class CuttableStore(dist.Store):
    """A store that stops to take the signs of one rank, as if its process were stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, str] = {}
        self.stopped = ""

    def set(self, key: str, value: str) -> None:
        if key != self.stopped:
            self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def set_timeout(self, timeout: object) -> None:
        pass


def wait_until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(INTERVAL_S)
    assert is_so()


def test_heartbeat_of_a_stopped_rank_is_missed() -> None:
    store = CuttableStore()
    beats = [Heartbeat(store, rank, 3, INTERVAL_S, lambda: Sign(task="step 7")) for rank in range(3)]
    wait_until(lambda: len(store.values) == 3)
    store.stopped = "1"
    wait_until(lambda: beats[0].silence_s > 20 * INTERVAL_S)
    wait_until(lambda: beats[1].silence_s == 0)  # rank 2 gives signs
    expected = {0: ("step 7", True), 1: ("step 7", False)}
    wait_until(lambda: {rank: (sign.task, runs) for rank, sign, runs in beats[2].others()} == expected)
    store.stopped = ""
    wait_until(lambda: beats[0].silence_s == 0)
    for beat in beats:
        beat.leave()


def test_heartbeat_of_a_rank_that_never_came_is_missed() -> None:
    beat = Heartbeat(CuttableStore(), 0, 2, INTERVAL_S, Sign)
    wait_until(lambda: beat.silence_s > 5 * INTERVAL_S)
    beat.leave()


def test_heartbeat_of_a_rank_that_has_left_is_not_missed() -> None:
    store = CuttableStore()
    beats = [Heartbeat(store, rank, 2, INTERVAL_S, Sign) for rank in range(2)]
    wait_until(lambda: len(store.values) == 2)
    beats[1].leave()
    time.sleep(20 * INTERVAL_S)
    assert beats[0].silence_s == 0
    assert [(rank, sign.has_left, runs) for rank, sign, runs in beats[0].others()] == [(1, True, True)]
    beats[0].leave()


def test_main_thread_place_is_outside_of_torch() -> None:
    place, is_waiting = main_thread_place()
    assert place.startswith("main_thread_place (heartbeat.py:") and not is_waiting
