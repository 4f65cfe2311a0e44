"""A step over the parts of a model equals the step over the model."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config import load_recipe
from titan_moe.data.packing import Batch
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones.optional import ReplicaSlots
from titan_moe.layers.init import init_weights
from titan_moe.metrics.table import measured
from titan_moe.models.part import part_of
from titan_moe.optim.build import build_optimizer
from titan_moe.parallel.balance import ExpertBalancer
from titan_moe.training.build import assemble, build_on_meta
from titan_moe.training.skips import Skips
from titan_moe.training.step import TrainStep

CPU = torch.device("cpu")
FP64 = ["--perf.kernels=reference", *(f"--precision.{name}=fp64" for name in ("compute", "master", "reduce"))]
CUT = [["embed", "layers.0"], ["layers.1"], ["norm", "head"]]


def test_step_over_parts_equals_the_step_over_the_model(tmp_path: Path) -> None:
    words = [*FP64, "--optim.max_grad_norm=0.1", "--optim.warmup_steps=0"]
    recipe = load_recipe(Path(__file__).with_name("tiny.toml"), words)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        whole = assemble(recipe, CPU)
        model = build_on_meta(recipe)
        parts = [part_of(model, kept).to_empty(device=CPU) for kept in CUT]
        for part in parts:
            stds = {"std": recipe.model.init_std, "embedding_std": recipe.model.embedding_init_std}
            init_weights(part, recipe.run.seed, num_layers=recipe.model.num_layers, **stds)

        def chained(batch: Batch, scale: Tensor) -> Tensor:
            losses = []
            for tokens_BN, labels_BN, document_ids_BN in batch.microbatches():
                x = tokens_BN
                for part in parts:
                    x = part(x, labels_BN, document_ids_BN)
                (x * scale).backward()
                losses.append(x.detach() * scale)
            return torch.stack(losses).sum()

        balancer = ExpertBalancer(parts, whole.meshes.world_group)
        limits = ExpertCapacity(), ReplicaSlots(), recipe.optim.max_grad_norm
        optimizer = build_optimizer(parts, recipe.optim)
        step = TrainStep(chained, optimizer, balancer, *limits, whole.meshes, [Skips(CPU)], measured(recipe))
        for number in range(4):
            tokens = torch.randint(64, (2, 2, 17), generator=torch.Generator().manual_seed(number))
            batch = Batch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous(), None)
            actual, expected = step(batch), whole.step.step(batch)
            assert expected.grad_norm > recipe.optim.max_grad_norm, "the norm of all parts clips"
            torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    finally:
        dist.destroy_process_group()
