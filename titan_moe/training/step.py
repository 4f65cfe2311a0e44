"""One optimizer step.

M microbatches · B sequences of a microbatch · N tokens of a sequence · E experts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.data.packing import IGNORE_LABEL, Batch
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.layers.mtp import LossSums
from titan_moe.metrics.table import Metric, StepNumbers, finish_mtp, measure, measure_of_all
from titan_moe.optim.build import Optimizers
from titan_moe.optim.qk_clip import QKClip
from titan_moe.parallel.balance import ExpertBalancer
from titan_moe.parallel.grads import ReplicatedGrads, clip_factor, grad_norm
from titan_moe.parallel.mesh import Meshes
from titan_moe.parallel.routing import StepRouting
from titan_moe.profile.region import region
from titan_moe.training.controller import DeviceController
from titan_moe.training.forward_backward import ForwardBackward


class StepResult(NamedTuple):
    """Results on the device; reading one waits for the step."""

    metrics: dict[str, Tensor]
    """Scalars by name, of all ranks: those that `metrics/table.py` measures, the norm, and counts of controllers."""
    tokens_per_expert: dict[str, Tensor]  # router name -> tokens of each expert over all ranks [E]
    topk_ids_MBNLK: Tensor | None = None
    """int32, the experts that this rank's tokens took, -1 in dense layers, if the batch had `topk_ids_MBNLK`."""

    @property
    def loss(self) -> Tensor:
        """Mean cross entropy over the label tokens of all ranks."""
        return self.metrics["loss"]

    @property
    def aux_loss(self) -> Tensor:
        """Balancing losses, a mean over all tokens of all ranks, with a label or not."""
        return self.metrics["aux_loss"]

    @property
    def grad_norm(self) -> Tensor:
        """The global norm before clipping."""
        return self.metrics["grad_norm"]


@dataclass
class TrainStep:
    """One optimizer step, without a host read.

    A step with rows that overflowed their slots, or that a controller refuses, changes no weights, moments, step counts
    or biases on any rank.
    """

    forward_backward: ForwardBackward
    optimizers: Optimizers
    balancer: ExpertBalancer
    capacity: ExpertCapacity
    replicas: ReplicaSlots
    max_grad_norm: float
    meshes: Meshes
    controllers: Sequence[DeviceController]
    metrics: Sequence[Metric]
    tied: tuple[nn.Parameter, ...] = ()
    """Parameters that two stages of a pipeline have."""
    replicated: Sequence[ReplicatedGrads] = ()
    """What tensor-parallel ranks sum, and ranks of etp."""
    mtp: Sequence[LossSums] = ()
    """The losses of multi-token prediction, on ranks that compute them."""
    qk_clip: QKClip | None = None
    """That of the optimizers, whose logits a step measures."""
    routing: StepRouting | None = None
    """That of `forward_backward`, where experts can be replayed."""

    def __call__(self, batch: Batch) -> StepResult:
        num_labels, num_tokens = self.count(batch)
        scale = 1.0 / num_labels.clamp(min=1)
        self.balancer.start(1.0 / num_tokens)
        self.capacity.reset()
        for sums in self.mtp:
            sums.reset_buffers()
        if self.qk_clip is not None:
            self.qk_clip.start()
        if self.routing is not None:
            self.routing.start(batch.tokens_MBN, batch.topk_ids_MBNLK)
        loss = self.forward_backward(batch, scale)
        topk_ids_MBNLK = None if self.routing is None else self.routing.finish(batch.topk_ids_MBNLK)
        self.finish_gradients()
        # ranks of cp have the same balancing losses, those of their whole sequences
        aux_loss = self.balancer.aux_loss(loss) / self.meshes.sizes.cp
        mtp_K2 = torch.cat([sums.sums_K2 for sums in self.mtp]) if self.mtp else None
        now = StepNumbers(loss, aux_loss, num_labels, num_tokens, self.capacity, self.meshes.sizes.ep, {})
        of_routers = {"bias_spread": self.balancer.bias_spread, "num_dropped": self.balancer.num_dropped}
        now = now._replace(mtp_K2=mtp_K2, **of_routers)
        if self.qk_clip is not None:
            self.qk_clip.reduce()
            now = now._replace(max_logit=self.qk_clip.largest, num_clipped=self.qk_clip.num_clipped)
        everyone = dict.fromkeys(("max", "total"), self.meshes.world_group)
        metrics = measure(self.metrics, now, {"sum": self.meshes.loss_group, **everyone})
        finish_mtp(metrics)
        with region("clip"):
            norm = metrics["grad_norm"] = grad_norm(self.optimizers.parameters, self.meshes, self.tied)
        refusals = [controller.follow(metrics) for controller in self.controllers]
        skips_update = reduce(torch.logical_or, refusals, metrics["has_overflowed"])
        tokens_per_expert = self.balancer.finish(skips_update)
        with region("optimizer"):
            factor = clip_factor(norm, self.max_grad_norm) if self.max_grad_norm > 0 else None
            self.optimizers.step(found_inf=skips_update.float(), grad_factor=factor)
            self.optimizers.zero_grad()
        now = now._replace(tokens_per_expert=tokens_per_expert, share_sums=self.balancer.share_sums(loss))
        now = now._replace(all_dropped=metrics.get("num_dropped"))
        metrics |= self.counts | measure_of_all(self.metrics, now)
        return StepResult(metrics, tokens_per_expert, topk_ids_MBNLK)

    @property
    def counts(self) -> dict[str, Tensor]:
        """What the controllers have counted so far."""
        return {name: count for controller in self.controllers for name, count in controller.counts.items()}

    def finish_gradients(self) -> None:
        """After all microbatches: the sums that are left."""
        for replicated in self.replicated:
            with region("sharding"):
                replicated.sum()

    def count(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Label tokens and tokens of the batches of all ranks, on the device. Routers see tokens without a label too,
        so the first number divides the loss and the second the balancing losses."""
        has_label_MBN = batch.labels_MBN != IGNORE_LABEL
        counts = torch.stack([has_label_MBN.sum(), torch.ones_like(has_label_MBN).sum()]).double()
        dist.all_reduce(counts, group=self.meshes.data_group)
        return counts[0], counts[1]
