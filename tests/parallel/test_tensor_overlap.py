"""Linear layers that gather or scatter their tokens: against whole GEMMs on one rank, and against PyTorch's own."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.nn.functional as F
from support import load
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.config import RecipeError
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.train import MetricsConfig
from titan_moe.layers.mlp import SwiGLUDown
from titan_moe.parallel.tensor_overlap import (
    _gather_matmul,
    _matmul_scatter,
    _refuse_workspace_of_other_ranks,
    gather_then_multiply,
    multiply_then_scatter,
    open_workspace,
)
from titan_moe.plan.cost.memory import workspace_bytes
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")
BATCH, TOKENS, WIDTH = 3, 4, 6  # tokens of a rank


def draw(*shape: int) -> Tensor:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def linear(weight: Tensor, layer: Any = None) -> Any:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype) if layer is None else layer
    layer.weight = nn.Parameter(weight.clone())
    return layer


def own_tokens(x_BND: Tensor, is_sequence: bool) -> Tensor:
    """A part of each sequence, or some of the sequences."""
    return x_BND.chunk(dist.get_world_size(), dim=1 if is_sequence else 0)[dist.get_rank()]


def difference(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(actual, expected, strict=True))


def gather(is_sequence: bool) -> float:
    """The largest difference of results and gradients from those of the whole layer."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    x, weights = draw(num_ranks * BATCH, num_ranks * TOKENS, WIDTH), draw(num_ranks, 5, WIDTH)
    directions = draw(num_ranks, num_ranks * BATCH, num_ranks * TOKENS, 5)
    layer = linear(weights[rank])
    gather_then_multiply(layer, dist.group.WORLD, is_sequence=is_sequence)
    own = own_tokens(x, is_sequence).clone().requires_grad_()
    y = layer(own)
    grads = torch.autograd.grad(y, (own, layer.weight), directions[rank])
    dx = torch.einsum("rbnm,rmk->bnk", directions, weights)
    dw = torch.einsum("bnm,bnk->mk", directions[rank], x)
    return difference((y, *grads), (x @ weights[rank].T, own_tokens(dx, is_sequence), dw))


def scatter(is_sequence: bool, has_activation: bool) -> float:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    width = 2 * WIDTH if has_activation else WIDTH
    whole = draw(num_ranks, num_ranks * BATCH, num_ranks * TOKENS, width).requires_grad_()
    weights, direction = draw(num_ranks, 5, WIDTH), draw(num_ranks * BATCH, num_ranks * TOKENS, 5)
    weight = weights[rank].clone().requires_grad_()
    gate, up = whole.chunk(2, dim=-1)
    active = F.silu(gate) * up if has_activation else whole
    every = [weight if other == rank else weights[other] for other in range(num_ranks)]
    expected = sum(active[other] @ every[other].T for other in range(num_ranks))
    dx, dw = torch.autograd.grad(expected, (whole, weight), direction)
    layer = linear(weights[rank], SwiGLUDown(WIDTH, 5) if has_activation else None)
    multiply_then_scatter(layer, dist.group.WORLD, is_sequence=is_sequence)
    own = whole[rank].detach().requires_grad_()
    y = layer(own)
    grads = torch.autograd.grad(y, (own, layer.weight), own_tokens(direction, is_sequence))
    return difference((y, *grads), (own_tokens(expected, is_sequence), dx[rank], dw))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("is_sequence", [True, False])
def test_layer_of_gathered_tokens_has_values_and_gradients_of_the_whole(
    ranks, num_ranks: int, is_sequence: bool
) -> None:
    assert max(ranks(num_ranks, gather, is_sequence)) < 1e-12


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("is_sequence", "has_activation"), [(True, False), (False, False), (False, True)])
def test_layer_of_scattered_sums_has_values_and_gradients_of_the_whole(
    ranks, num_ranks: int, is_sequence: bool, has_activation: bool
) -> None:
    assert max(ranks(num_ranks, scatter, is_sequence, has_activation)) < 1e-12


def beside_pytorch() -> float:
    """What PyTorch's fused operations are to return, from their own definitions."""
    name, num_ranks = dist.group.WORLD.group_name, dist.get_world_size()
    x, rows = draw(TOKENS, WIDTH) + dist.get_rank(), draw(num_ranks * TOKENS, WIDTH) + dist.get_rank()
    weight = draw(5, WIDTH).T
    gathered, (product,) = symmetric._fused_all_gather_matmul_fallback(x, [weight], 0, name)
    summed = symmetric._fused_matmul_reduce_scatter_fallback(rows, weight, "sum", 0, name)
    actual = (*_gather_matmul(x, weight, name, num_ranks), _matmul_scatter(rows, weight, name, num_ranks))
    return difference(actual, (gathered, product, summed))


def test_operations_are_defined_as_those_of_pytorch(ranks) -> None:
    assert max(ranks(2, beside_pytorch)) < 1e-12


class Calls(TorchDispatchMode):
    """Counts operations of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.number: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number[str(op)] += 1
        return op(*args, **(kwargs or {}))


def count(overlaps: bool, name: str) -> Counter[str]:
    """The operations of a forward pass."""
    parallel = ParallelConfig(tp=2, tp_comm_overlap=overlaps)
    built = assemble(one_loss.split_recipe(parallel, name), torch.device("cpu"))
    tokens = torch.zeros(2, one_loss.TOKENS, dtype=torch.int64)
    with Calls() as calls, torch.no_grad():
        built.parts[0](tokens)
    return calls.number


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_every_attention_and_dense_layer_overlaps(ranks, name: str) -> None:
    """3 layers, each with attention, and a dense layer or shared experts. Other messages stay, such as latents."""
    plain, overlapped = (ranks(2, count, overlaps, name)[0] for overlaps in (False, True))
    gathers, scatters = "titan_moe.all_gather.default", "titan_moe.reduce_scatter.default"
    fused = "titan_moe.gather_matmul.default", "titan_moe.matmul_scatter.default"
    assert [plain[operation] for operation in fused] == [0, 0]
    assert [overlapped[operation] for operation in fused] == [6, 6]
    assert plain[gathers] - overlapped[gathers] == plain[scatters] - overlapped[scatters] == 6


class Messages(TorchDispatchMode):
    """Notes what PyTorch's operations would ask of the workspace: own rows, or partial sums for two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(op) == "titan_moe.gather_matmul.default":
            self.num_bytes.add(args[0].nbytes)
        elif str(op) == "titan_moe.matmul_scatter.default":
            rows, weight, _, num_ranks = args
            self.num_bytes.add(2 * rows.shape[0] // num_ranks * weight.shape[1] * rows.element_size())
        return op(*args, **(kwargs or {}))


def overlapping(name: str, **changes: Any) -> Recipe:
    return one_loss.split_recipe(ParallelConfig(tp=2, tp_comm_overlap=True), name, **changes)


def largest_message(recipe: Recipe) -> int:
    """The bytes of a forward and backward of a microbatch."""
    built = assemble(recipe, torch.device("cpu"))
    tokens = torch.zeros(recipe.train.micro_batch_sequences, recipe.train.seq_len_tokens, dtype=torch.int64)
    with Messages() as messages:
        built.parts[0](tokens, tokens).backward()
    return max(messages.num_bytes)


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_workspace_has_room_for_the_largest_message(ranks, name: str) -> None:
    recipe = overlapping(name)
    assert ranks(2, largest_message, recipe)[0] == workspace_bytes(recipe)


def test_workspace_has_room_for_a_long_sample() -> None:
    """A microbatch has 4 sequences; a sample is one, here of as many tokens as 40."""
    recipe, num_tokens = overlapping("gqa"), 40 * one_loss.TOKENS
    sampled = replace(recipe, metrics=MetricsConfig(sample_tokens=num_tokens - one_loss.TOKENS))
    assert workspace_bytes(sampled) == 10 * workspace_bytes(recipe)


def test_workspace_is_opened_before_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, int]] = []
    monkeypatch.setattr(symmetric, "get_backend", lambda device: "CUDA")
    monkeypatch.setattr(symmetric, "empty", lambda *sizes, **options: torch.empty(*sizes))
    monkeypatch.setattr(symmetric, "rendezvous", lambda tensor, group: None)
    monkeypatch.setattr(symmetric, "get_symm_mem_workspace", lambda name, min_size: opened.append((name, min_size)))
    group = SimpleNamespace(group_name="of tp")
    meshes: Any = SimpleNamespace(dense={"tp": SimpleNamespace(get_group=lambda: group)})
    recipe = overlapping("gqa")
    plain = replace(recipe, parallel=ParallelConfig(tp=2))
    for run, device in ((recipe, "cuda:0"), (recipe, "cpu"), (plain, "cuda:0")):
        open_workspace(workspace_bytes(run), meshes, torch.device(device))
    assert opened == [("of tp", workspace_bytes(recipe))]


@pytest.mark.parametrize(("rank", "num_ranks", "is_refused"), [(0, 2, False), (0, 4, True), (1, 2, True)])
def test_workspace_of_other_ranks_is_refused(rank: int, num_ranks: int, is_refused: bool) -> None:
    """PyTorch finds it by the name of the group, which another group had in an earlier run of the process."""
    group: Any = SimpleNamespace(group_name="7", rank=lambda: rank, size=lambda: num_ranks)
    earlier = SimpleNamespace(rank=0, world_size=2)
    kept = SimpleNamespace(
        _group_name_to_workspace_tensor={"7": torch.empty(1)},
        _SymmetricMemory=SimpleNamespace(rendezvous=lambda tensor: earlier),
    )
    with pytest.raises(RecipeError, match="start another process") if is_refused else nullcontext():
        _refuse_workspace_of_other_ranks(group, kept)
    kept._group_name_to_workspace_tensor.clear()
    _refuse_workspace_of_other_ranks(group, kept)
    assert isinstance(symmetric._group_name_to_workspace_tensor, dict), "PyTorch's own"
    assert hasattr(symmetric._SymmetricMemory, "rendezvous")
