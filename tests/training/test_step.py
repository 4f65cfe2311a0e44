"""A step's losses: what each is divided by."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.config import Recipe, load_recipe
from titan_moe.data.packing import IGNORE_LABEL, Batch
from titan_moe.layers.init import init_weights
from titan_moe.parameters import full_tensor
from titan_moe.training.build import assemble, build_on_meta
from titan_moe.training.step import StepResult

CPU = torch.device("cpu")
FP64 = ["--perf.kernels=reference", *(f"--precision.{name}=fp64" for name in ("compute", "master", "reduce"))]
AUX_COEF, Z_COEF = 0.3, 0.05
TOKENS_MBN = torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    """One MoE layer, so that its balancing losses reach its router only through its logits; two microbatches."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield load_recipe(Path(__file__).with_name("tiny.toml"), FP64)
    dist.destroy_process_group()


def labels_where(share: float) -> Tensor:
    """A part of the labels, of some sequences more than of others; the rest is masked."""
    draws = torch.rand(TOKENS_MBN.shape, generator=torch.Generator().manual_seed(1))
    return TOKENS_MBN.roll(-1, -1).masked_fill(draws >= share, IGNORE_LABEL)


def first_step(recipe: Recipe, labels_MBN: Tensor) -> tuple[Tensor, StepResult]:
    """The router's gradient before clipping, and the result."""
    assembly = assemble(recipe, CPU)
    step, router = assembly.step.step, assembly.parts[0].layers["1"].feed_forward.router
    grads = []
    with mock.patch.object(step, "finish_gradients", lambda: grads.append(full_tensor(router.weight.grad).clone())):
        result = step(Batch(TOKENS_MBN, labels_MBN, None))
    return grads[0], result


def balancing_loss(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The definition (arXiv:2412.19437 eq. 17-20, arXiv:2202.08906 eq. 5), a mean over sequences and tokens, and its
    gradient of the router's weight."""
    model, moe, inputs = build_on_meta(recipe).to_empty(device=CPU), recipe.model.moe, []
    stds = {"std": recipe.model.init_std, "embedding_std": recipe.model.embedding_init_std}
    init_weights(model, recipe.run.seed, num_layers=recipe.model.num_layers, **stds)
    router = model.layers["1"].feed_forward.router
    handle = router.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
    model(TOKENS_MBN.flatten(0, 1))
    handle.remove()
    logits_BNE = inputs[0] @ router.weight.T
    shares_BNE = logits_BNE.sigmoid() / logits_BNE.sigmoid().sum(-1, keepdim=True)
    chosen_BNE = torch.zeros_like(shares_BNE).scatter(-1, shares_BNE.topk(moe.top_k).indices, 1.0)
    balance_B = moe.num_experts / moe.top_k * (chosen_BNE.mean(1) * shares_BNE.mean(1)).sum(-1)
    loss = AUX_COEF * balance_B.mean() + Z_COEF * logits_BNE.logsumexp(-1).square().mean()
    return loss, torch.autograd.grad(loss, router.weight)[0]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_balancing_losses_are_means_over_all_tokens_whatever_the_share_of_labels(recipe: Recipe, share: float) -> None:
    labels_MBN = labels_where(share)
    assert (labels_MBN != IGNORE_LABEL).double().mean() == pytest.approx(share, abs=0.2)
    balanced, plain = (
        replace(recipe, model=replace(recipe.model, moe=replace(recipe.model.moe, aux_loss_coef=a, z_loss_coef=z)))
        for a, z in ((AUX_COEF, Z_COEF), (0.0, 0.0))
    )
    grad, result = first_step(balanced, labels_MBN)
    main_grad, main_result = first_step(plain, labels_MBN)
    loss, expected = balancing_loss(balanced)
    torch.testing.assert_close(grad - main_grad, expected, rtol=1e-9, atol=1e-12)
    assert result.aux_loss.item() == pytest.approx(loss.item(), rel=1e-6), "it is summed in fp32"
    assert result.loss == main_result.loss and bool(result.grad_norm.isfinite())
    assert result.metrics["skipped_steps"] == 0 and (result.loss == 0) == (main_grad == 0).all() == (share == 0)
