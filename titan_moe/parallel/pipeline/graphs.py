"""The CUDA graphs of a pipeline rank: the forward and the backward of each stage in each place in flight.

A microbatch in flight needs activations of its own. So a stage has graphs for each place in flight (places.py), and the
schedule gives the same microbatches the same places in every step. Messages, the optimizer and all that is between
actions are launched.

All graphs of a place, of whatever stage, share one memory pool. A capture reuses what is free in its pool, so a replay
may overwrite what others of the pool leave there. That is safe, because one microbatch has the place at a time: from
the replay of its forward, which leaves activations in the pool, to that of its backward no other graph of the pool
runs. Results are copied out of the pool at once. One pool for all places would be wrong: the backward of one place,
captured after that of another, would reuse the memory of the other's activations, and a later microbatch may be in
flight there when it is replayed. A pool has room for the largest stage: what its microbatch keeps, and temporaries,
which launched actions would share.

What lasts for a step lies in a pool of its own: parameters that are unsharded for the step, the sums of their
gradients, copies of unsharded experts in compute's dtype. All of it is held while the other graphs of the pool are
captured, and they are replayed in the order of their capture. So each graph of a place finds these tensors where they
were when it was captured.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

from torch import nn

from titan_moe.compile.cudagraph import Captured, Pool, Recorder
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.parallel import fsdp, unsharded_experts
from titan_moe.parallel.pipeline.runs import CapturedRun, StageActions

OF_STEP = "step"
"""The pool of what lasts for a step."""


class PipelineGraphs:
    """Records the runs of a rank's stages, and what begins and ends a step, each at its first use."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        stages_with_experts: frozenset[int],
        recorder: Recorder,
        queue: WeightGradQueue | None,
        *,
        keeps_unsharded: bool,
    ) -> None:
        """`stages` are those with modules. With `keeps_unsharded`, parameters are gathered when a step begins, and
        gradients are reduced after the last action of their stage."""
        self.stages, self.stages_with_experts = stages, stages_with_experts
        self.recorder, self.queue, self.keeps_unsharded = recorder, queue, keeps_unsharded
        self.num_released = 0
        self.graphs: list[Captured] = []
        self.pools: dict[Hashable, Pool] = {}
        self.of_step: dict[tuple[str, int], Captured] = {}
        self.runs: dict[tuple[int, int, bool], CapturedRun] = {}

    @property
    def num_recordings(self) -> int:
        """CUDA graphs recorded so far."""
        return self.num_released + sum(graph.num_recordings for graph in self.graphs)

    def begin(self) -> None:
        """Before the first action of a step: make what lasts for it."""
        for stage, part in self.stages.items():
            if self.keeps_unsharded or unsharded_experts.have_kept_casts(part):
                self._of_step("beginning", stage, partial(self._begin, part))

    def run_of(self, stage: int, place: int, *, is_split: bool) -> CapturedRun:
        """The graphs of a stage in a place, for microbatches whose backward is split or not."""
        key = stage, place, is_split
        if key not in self.runs:
            options = {"is_split": is_split, "keeps_unsharded": self.keeps_unsharded}
            actions = StageActions(self.stages[stage], self.queue, **options)
            capture = partial(self._capture, stage=stage, pool=(stage in self.stages_with_experts, place))
            self.runs[key] = CapturedRun(actions, capture)
        return self.runs[key]

    def end(self, stage: int) -> None:
        """After the last action of a stage: reduce its gradients, if no backward did."""
        if self.keeps_unsharded and stage in self.stages:
            self._of_step("end", stage, partial(_reduce, self.stages[stage]))

    def release(self) -> None:
        """Free the memory of all graphs. The next step records them again."""
        self.num_released = self.num_recordings
        for graph in self.graphs:
            graph.release()
        for held in (self.graphs, self.pools, self.of_step, self.runs):
            held.clear()

    def _begin(self, part: nn.Module) -> None:
        unsharded_experts.keep_casts(part)
        if self.keeps_unsharded:
            fsdp.start_accumulating(part)

    def _of_step(self, name: str, stage: int, function: Callable[[], None]) -> None:
        if (name, stage) not in self.of_step:
            self.of_step[name, stage] = self._capture(function, name, stage=stage, pool=OF_STEP)
        self.of_step[name, stage]()

    def _capture(self, function: Callable[..., Any], name: str, *, stage: int, pool: Hashable) -> Captured:
        if pool not in self.pools:
            self.pools[pool] = self.recorder.new_pool()
        self.graphs.append(Captured(function, self.recorder, self.pools[pool], name=f"{name} of stage {stage}"))
        return self.graphs[-1]


def _reduce(part: nn.Module) -> None:
    fsdp.start_reducing(part)
    fsdp.finish_reducing(part)
