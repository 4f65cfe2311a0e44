"""The head and its loss over ranks that have parts of the vocabulary, in PyTorch and in Triton."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support import load
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from titan_moe.config import Recipe
from titan_moe.config.kernels import Backend
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import DataConfig
from titan_moe.kernels.loss.cross_entropy import IGNORE_LABEL
from titan_moe.layers.head import LanguageModelHead
from titan_moe.parallel.vocabulary import VocabParallelHead, fused_cross_entropy_over_ranks

one_loss = load("distributed/test_one_loss")
BATCH, LENGTH, WIDTH, WORDS = 3, 8, 16, 40


BIAS_W = torch.linspace(-2, 2, WORDS, dtype=torch.float64)


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, weight, and labels of all parts, of which some are ignored."""
    torch.manual_seed(0)
    labels_BN = torch.randint(WORDS, (BATCH, LENGTH))
    labels_BN[0, ::3] = IGNORE_LABEL
    return torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype), torch.randn(WORDS, WIDTH, dtype=dtype), labels_BN


def train_head(backend: Backend, dtype: torch.dtype, chunk_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss over ranks, that without gradients, and the gradients of own tokens and own words."""
    rank, num_ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    x_BND, weight_WD, labels_BN = draw(dtype)
    head = LanguageModelHead(WIDTH, WORDS, chunk_tokens, backend)
    head.weight = torch.nn.Parameter(weight_WD.chunk(num_ranks)[rank].clone())
    if backend == "torch":
        head.bias = torch.nn.Parameter(BIAS_W.chunk(num_ranks)[rank].clone())
    forward = VocabParallelHead(head, group)
    own_BnD = x_BND.chunk(num_ranks, 1)[rank].clone().requires_grad_()
    loss = forward(own_BnD, labels_BN)
    (loss / 7).backward()
    with torch.no_grad():
        alone = forward(own_BnD, labels_BN)
    assert own_BnD.grad is not None and head.weight.grad is not None
    return loss.detach(), alone, own_BnD.grad, head.weight.grad


@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_loss_over_ranks_is_that_of_all_logits(ranks: Any, chunk_tokens: int) -> None:
    check_head(ranks, "torch", torch.float64, chunk_tokens)


@pytest.mark.interpreted
@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_fused_loss_over_ranks_is_that_of_all_logits(ranks: Any, chunk_tokens: int) -> None:
    check_head(ranks, "triton", torch.float32, chunk_tokens)


def check_head(ranks: Any, backend: Backend, dtype: torch.dtype, chunk_tokens: int) -> None:
    x_BND, weight_WD, labels_BN = (tensor.clone() for tensor in draw(dtype))
    x_BND.requires_grad_(), weight_WD.requires_grad_()
    logits_TW = (x_BND @ weight_WD.T + (BIAS_W if backend == "torch" else 0)).flatten(0, 1)
    loss = F.cross_entropy(logits_TW, labels_BN.flatten(), ignore_index=IGNORE_LABEL, reduction="sum")
    (loss / 7).backward()
    assert x_BND.grad is not None and weight_WD.grad is not None
    for num_ranks in (2, 4):
        results = ranks(num_ranks, train_head, backend, dtype, chunk_tokens)
        for rank, (trained, alone, dx_BnD, dweight_VD) in enumerate(results):
            assert torch.equal(trained, results[0][0]), "the same on all ranks"
            torch.testing.assert_close(trained, loss.detach())
            torch.testing.assert_close(alone, loss.detach())
            torch.testing.assert_close(dx_BnD, x_BND.grad.chunk(num_ranks, 1)[rank])
            torch.testing.assert_close(dweight_VD, weight_WD.grad.chunk(num_ranks)[rank])


def refuse_fused(label: int) -> str:
    """What the fused loss says of a label that is in no part."""
    assert dist.group.WORLD is not None
    x_BND, weight_WD, labels_BN = draw(torch.float32)
    own_VD = weight_WD.chunk(dist.get_world_size())[dist.get_rank()]
    labels_BN[1, 1] = label
    group_name = dist.group.WORLD.group_name
    with pytest.raises(RuntimeError) as refused:
        fused_cross_entropy_over_ranks(x_BND.flatten(0, 1), own_VD, labels_BN.flatten(), 5, group_name)
    return str(refused.value)


@pytest.mark.interpreted
@pytest.mark.parametrize("label", [WORDS, -1])
def test_fused_loss_refuses_a_label_outside_the_vocabulary(ranks: Any, label: int) -> None:
    assert all("a label is outside of the vocabulary" in said for said in ranks(2, refuse_fused, label))


def refuse(label: int) -> str:
    """What PyTorch's loss says of a label on all ranks."""
    x_BND, weight_WD, labels_BN = draw(torch.float32)
    labels_BN[1, 2] = label
    head = LanguageModelHead(WIDTH, WORDS, 5, "torch")
    head.weight = torch.nn.Parameter(weight_WD.chunk(dist.get_world_size())[dist.get_rank()].clone())
    with pytest.raises(RuntimeError) as refused:
        VocabParallelHead(head, dist.group.WORLD)(x_BND.chunk(dist.get_world_size(), 1)[dist.get_rank()], labels_BN)
    return str(refused.value)


@pytest.mark.parametrize("label", [-1, WORDS])
def test_label_outside_the_vocabulary_is_refused(ranks: Any, label: int) -> None:
    assert all("a label is outside of the vocabulary" in said for said in ranks(2, refuse, label))


def count_flops() -> int:
    assert dist.group.WORLD is not None
    x_TD, weight_VD = (torch.empty(size, WIDTH, device="meta", requires_grad=True) for size in (12, WORDS))
    labels_T = torch.empty(12, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter:
        fused_cross_entropy_over_ranks(x_TD, weight_VD, labels_T, 5, dist.group.WORLD.group_name).backward()
    return counter.get_total_flops()


def test_flops_of_the_fused_loss_over_ranks_are_counted(ranks: Any) -> None:
    assert ranks(1, count_flops) == [6 * 12 * WIDTH * WORDS]


def recipe_of(head: Backend, parallel: ParallelConfig) -> Recipe:
    """In fp32 with PyTorch's kernels, but for the head."""
    base = one_loss.split_recipe(parallel, "gqa-tied", precision=PrecisionConfig("fp32", "fp32", "fp32"))
    override = replace(base.perf.override, head=head)
    perf = replace(base.perf, override=override)
    return replace(base, perf=perf, data=DataConfig())


@pytest.mark.interpreted
def test_training_with_the_fused_head_over_ranks_equals_one_process(ranks: Any) -> None:
    """An embedding that is the head's weight adds its gradient; two microbatches; with dp beside tp."""
    steps = 3
    (alone,) = one_loss.run(ranks, 1, recipe_of("torch", ParallelConfig()), -1, steps)
    for trace in one_loss.run(ranks, 4, recipe_of("triton", ParallelConfig(tp=2)), -1, steps):
        one_loss.assert_same(trace, alone, 1e-4)
