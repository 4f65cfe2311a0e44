"""Forward and backward of a step through the stages of this rank, by the actions of plan/pipeline/schedules.py.

A model without pipeline parallelism is a pipeline of one stage. Its only order is 1f1b: one microbatch after the other,
or with `overlap = "microbatch"` the backward of one beside the forward of the next.

The lists of actions come from plan/pipeline, which `check` simulates and this file runs without changes. Every stage
and microbatch has a separate autograd graph (runs.py): only activations and their gradients pass between stages. With
`overlap = "microbatch"` the graph is cut into pieces, and the two of a pair take turns. The backward is
first, because it frees memory.

`backward_input` runs the backward of that graph. The layers of weight_grads.py do not compute their weight gradients
then, but keep the operands; everything else that the microbatch kept is freed. `backward_weight` computes these
gradients and accumulates them. A whole `backward` computes all gradients. FSDP's hooks run in the backward of a whole
graph, before delayed weight gradients. So with split backwards the hooks never reduce gradients: these are accumulated,
and reduced after the last action of the stage. They do not run for pieces, whose last backward reduces layer by layer.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn

from titan_moe.config.recipe import sums_replicas_once
from titan_moe.data.packing import Batch
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.delayed_weight_grads import PendingWeightGrads, WeightGradQueue
from titan_moe.models.part import reads_tokens
from titan_moe.parallel import fsdp
from titan_moe.parallel.arena import count_moe_layers
from titan_moe.parallel.fsdp import DTYPES
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.pipeline.messages import Messages, Received, activations_like
from titan_moe.parallel.pipeline.rehearsal import Rehearsals, StandIns, first_microbatches, unchanged
from titan_moe.parallel.pipeline.runs import Delaying, RunInPieces, StageInPieces, StageRun, WholeRun
from titan_moe.parallel.pipeline.slabs import InFlight, Slabs
from titan_moe.parallel.pipeline.stages import TiedEmbedding, parts_by_stage
from titan_moe.parallel.routing import StepRouting, within
from titan_moe.parallel.unsharded_experts import caching_casts
from titan_moe.plan.pipeline.action import Action, Pair, actions_in, flat
from titan_moe.plan.pipeline.schedules import actions_of_recipe
from titan_moe.plan.resolved import Resolved
from titan_moe.profile.region import action_region


class Pipeline:
    """`ForwardBackward` of a rank's stages; all ranks of the pipeline call it with the same batch.

    The loss is that of the last stage, and zero on ranks without it.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        resolved: Resolved,
        meshes: Meshes,
        tied: TiedEmbedding | None,
        queue: WeightGradQueue | None,
        *,
        capacity: ExpertCapacity,
        routing: StepRouting,
    ) -> None:
        """`queue` is that of the layers (weight_grads.py); None if the schedule does not split backwards.
        `capacity` has the arena of microbatches in flight, `routing` their experts."""
        recipe = resolved.recipe
        p = self.config = recipe.parallel
        self.rank, self.group = meshes.dense.get_local_rank("pp"), meshes.pipeline_group
        self.stages, self.ranks = parts_by_stage(parts, resolved, meshes), resolved.ranks
        self.last_stage = len(self.ranks) - 1
        self.tied, self.queue, self.capacity, self.routing = tied, queue, capacity, routing
        self.sums_replicas_once = sums_replicas_once(recipe)
        self.runs_in_pieces = p.overlap == "microbatch"
        self.reduces_at_the_end = queue is not None
        """Gradients of a stage, after its last action; else in its last backward."""
        without_rows = resolved.recompute.of("experts")
        with_rows = (stage for stage, part in self.stages.items() if count_moe_layers(part, without_rows))
        self.stages_with_experts = frozenset(with_rows)
        self.stages_that_read = frozenset(stage for stage, part in self.stages.items() if reads_tokens(part))
        self.hidden_size, self.dtype = recipe.model.hidden_size, DTYPES[recipe.precision.compute]
        self.rehearsals = Rehearsals(resolved, capacity)

    def __call__(self, batch: Batch, scale: Tensor) -> Tensor:
        actions = actions_of_recipe(self.config, len(batch.tokens_MBN))[self.rank]
        like = activations_like(batch.tokens_MBN[0], self.config.tp, self.hidden_size, self.dtype)
        if self.rehearsals.is_due(like.device):
            with unchanged(self.stages.values(), self.capacity, like.device), self.routing.unchanged():
                StepRun(self, batch, scale, first_microbatches(actions), StandIns(like)).take(in_lane=False)
        run = StepRun(self, batch, scale, actions, Messages(self.group, like))
        run.take(in_lane=self.config.pp > 1)
        if self.tied is not None:
            self.tied.sum_gradients()
        return torch.stack(run.losses).sum() if run.losses else scale.new_zeros(())


class StepRun:
    """The microbatches of a step under way, or of its rehearsal."""

    def __init__(
        self,
        pipeline: Pipeline,
        batch: Batch,
        scale: Tensor,
        listed: list[Action | Pair],
        messages: Messages | StandIns,
    ) -> None:
        """`listed` are this rank's."""
        self.pipeline, self.scale, self.stages = pipeline, scale, pipeline.stages
        self.microbatches, self.listed, self.messages = list(batch.microbatches()), listed, messages
        self.slabs = Slabs(pipeline.capacity, pipeline.stages_with_experts)
        self.received = defaultdict[InFlight, list[Tensor]](list)
        """The messages of a microbatch, until its gradients are computed: delayed weight gradients may read them."""
        self.inputs: dict[InFlight, Received] = {}
        self.outputs: dict[InFlight, Tensor] = {}
        stages_in_pieces = self.stages if pipeline.runs_in_pieces else ()
        self.in_pieces = {stage: StageInPieces(self.stages[stage]) for stage in stages_in_pieces}
        self.runs: dict[InFlight, StageRun] = {}
        self.output_grads: dict[InFlight, Received] = {}
        self.input_grads: dict[InFlight, Tensor] = {}
        self.losses: list[Tensor] = []
        self.weight_grads: dict[InFlight, PendingWeightGrads] = {}
        actions = list(flat(listed))
        self.split_backwards = {action[1:] for action in actions if action.kind == "backward_input"}
        self.num_backwards_left = Counter(action.stage for action in actions if action.frees)

    def take(self, *, in_lane: bool) -> None:
        """Run this rank's list, and wait for what was sent and reduced. A trace has its actions in the rank's lane, or
        not."""
        with ExitStack() as casts:
            for part in self.stages.values():
                casts.enter_context(caching_casts(part))
            for action in self.listed:
                with action_region(action) if in_lane else nullcontext():
                    self._do(action)
        self.messages.finish()
        if self.pipeline.reduces_at_the_end or self.in_pieces:  # else the hooks of FSDP have waited
            for part in self.stages.values():
                fsdp.finish_reducing(part)

    def _do(self, listed: Action | Pair) -> None:
        """Run what is next in this rank's list."""
        if isinstance(listed, Pair):
            self._run_pair(listed)
        else:
            self._run(listed)
        for action in actions_in(listed):
            if action.frees:
                self.slabs.free(action.stage, action.microbatch)
                for message in self.received.pop(action[1:], ()):
                    self.messages.free(message)
                self._end_backward(action.stage)

    def _run(self, action: Action) -> None:
        kind, stage, microbatch = action
        key, ranks = (stage, microbatch), self.pipeline.ranks
        match kind:
            case "forward":
                for _ in self._forward(stage, microbatch):
                    pass
            case "backward":
                for _ in self._backward(stage, microbatch):
                    pass
            case "backward_input":
                with self.slabs.backward_of(stage, microbatch):
                    for _ in self._backward(stage, microbatch):
                        pass
            case "backward_weight":
                self.weight_grads.pop(key).compute()
            case "send_activation":
                self.messages.send(self.outputs.pop(key), ranks[stage + 1])
            case "receive_activation":
                self.inputs[key] = self._receive(key, ranks[stage - 1])
            case "send_gradient":
                self.messages.send(self.input_grads.pop(key), ranks[stage - 1])
            case "receive_gradient":
                self.output_grads[key] = self._receive(key, ranks[stage + 1])

    def _receive(self, key: InFlight, rank: int) -> Received:
        received = self.messages.receive(rank)
        self.received[key].append(received.tensor)
        return received

    def _beside_messages(self, key: InFlight, tensor: Tensor) -> Tensor:
        """What a stage returns, which lasts longer than the messages of the microbatch: a copy if it is one of them, as
        a stage without layers returns what it gets."""
        storages = [message.untyped_storage().data_ptr() for message in self.received[key]]
        return tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor

    def _run_pair(self, pair: Pair) -> None:
        """Both begin when both can; a wait in between would stop the other one too."""
        forward, backward = pair.forward[1:], pair.backward[1:]
        if forward in self.inputs:  # not tokens
            self.inputs[forward].wait()
        self.output_grads[backward].wait()
        for _ in zip_longest(self._backward(*backward), self._forward(*forward)):
            pass

    def _forward(self, stage: int, microbatch: int) -> Iterator[None]:
        key = stage, microbatch
        tokens_BN, labels_BN, ids_BN = self.microbatches[microbatch]
        x = tokens_BN if stage == 0 else self.inputs.pop(key).wait().detach().requires_grad_()
        is_last = stage == self.pipeline.last_stage
        inputs = labels_BN, ids_BN, self.scale if is_last else None, self._delaying(key)
        read_BN = tokens_BN if stage > 0 and stage in self.pipeline.stages_that_read else None
        in_pieces = self.in_pieces.get(stage)
        if in_pieces is not None:
            run: StageRun = RunInPieces(in_pieces, *inputs, read_BN=read_BN)
        else:
            run = WholeRun(self.stages[stage], *inputs, read_BN=read_BN)
        self.runs[key] = run
        stretches = within(self.pipeline.routing, self.stages[stage], microbatch, run.forward(x))
        with self.slabs.forward_of(stage, microbatch):
            out = self._beside_messages(key, (yield from stretches))
        if is_last:
            self.losses.append(out)
            self.output_grads[key] = Received(torch.ones_like(out), None)
        elif stage + 1 in self.stages:
            self.inputs[stage + 1, microbatch] = Received(out, None)
        else:
            self.outputs[key] = out

    def _delaying(self, key: InFlight) -> Delaying:
        """Let the layers leave the weight gradients of a forward, or of a piece of it, to `backward_weight`, if its
        backward is split."""
        if key not in self.split_backwards:
            return nullcontext
        assert self.pipeline.queue is not None, "the schedule splits backwards"
        pending = self.weight_grads[key] = PendingWeightGrads()
        return partial(self.pipeline.queue.delaying, pending)

    def _backward(self, stage: int, microbatch: int) -> Iterator[None]:
        key = stage, microbatch
        reduces = not self.pipeline.reduces_at_the_end and self.num_backwards_left[stage] == 1
        if self.pipeline.config.accumulate_unsharded:
            fsdp.set_unsharded_accumulation(self.stages[stage], not reduces)
        elif self.pipeline.sums_replicas_once:
            fsdp.set_replica_reduction(self.stages[stage], reduces)
        stretches = self.runs.pop(key).backward(self.output_grads.pop(key).wait(), reduces=reduces)
        grad = yield from within(self.pipeline.routing, self.stages[stage], microbatch, stretches)
        if stage == 0:
            return
        assert grad is not None, f"stage {stage} does not depend on the stage before it"
        grad = self._beside_messages(key, grad)
        if stage - 1 in self.stages:
            self.output_grads[stage - 1, microbatch] = Received(grad, None)
        else:
            self.input_grads[key] = grad

    def _end_backward(self, stage: int) -> None:
        self.num_backwards_left[stage] -= 1
        if not self.pipeline.reduces_at_the_end:
            return
        fsdp.accumulate_late_grads(self.stages[stage])
        if self.num_backwards_left[stage] == 0:
            fsdp.start_reducing(self.stages[stage])
