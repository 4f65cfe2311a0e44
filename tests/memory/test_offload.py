"""Offload: the same bits, memory of the GPU that is let go, and the order of copies between two streams."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakSet, ref

import pytest
import torch
from torch import Tensor, nn

from titan_moe.compile import regional
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.modules import modules_of
from titan_moe.config.offload import OFFLOADABLE, offload_of
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.recompute import recompute_of
from titan_moe.layers.block import Block
from titan_moe.layers.init import init_weights
from titan_moe.memory import offload, recompute
from titan_moe.memory.host_copies import CHUNK_BYTES, Copies, NoStream, Places
from titan_moe.memory.saved_tensors import Scope
from titan_moe.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=16,
    num_layers=4,
    hidden_size=16,
    norm_placement="both",
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True, output_gate="element"),
    moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss_coef=1e-2),
)
MLA = replace(
    CONFIG,
    attention=AttentionConfig(
        kind="mla", num_heads=2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    ),
)
ALL = tuple(OFFLOADABLE)
TOKENS, LABELS = torch.randint(16, (2, 2, 8), generator=torch.Generator().manual_seed(0)).unbind()


class Recorded(NoStream):
    """A stream that says what is done, in order, by the addresses of the host."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def copy(self, target: Tensor, source: Tensor) -> Any:
        super().copy(target, source)
        is_out = target.data_ptr() in self.places
        self.said.append(("out", target.data_ptr()) if is_out else ("in", source.data_ptr()))
        return self.said[-1]

    def wait(self, end: Any) -> None:
        self.said.append((f"wait {end[0]}", end[1]))

    def host_memory(self, num_bytes: int) -> Tensor:
        memory = super().host_memory(num_bytes)
        self.places = range(memory.data_ptr(), memory.data_ptr() + num_bytes)
        return memory


class Late(NoStream):
    """A stream that copies in order and as late as is allowed, and holds nothing itself."""

    def __init__(self) -> None:
        self.waiting: list[tuple[ref[Tensor], ref[Tensor]]] = []
        self.num_done = 0

    def copy(self, target: Tensor, source: Tensor) -> Any:
        self.waiting.append((ref(target), ref(source)))
        return len(self.waiting)

    def wait(self, end: Any) -> None:
        for target, source in self.waiting[self.num_done : end]:
            target().copy_(source())
        self.num_done = max(self.num_done, end)


def recipe_of(offloaded: Sequence[str] = (), recomputed: Sequence[str] = (), config: ModelConfig = CONFIG) -> Recipe:
    return Recipe(model=config, memory=MemoryConfig(tuple(recomputed), tuple(offloaded)))


def build(
    offloaded: Sequence[str] = (),
    recomputed: Sequence[str] = (),
    config: ModelConfig = CONFIG,
    block_class: type[nn.Module] = Block,
    regional_graphs: str = "off",
    stream: NoStream | None = None,
) -> tuple[Transformer, Any]:
    recipe = recipe_of(offloaded, recomputed, config)
    model_class = type("Model", (Transformer,), {"block_class": block_class})
    torch.set_default_dtype(torch.float64)
    try:
        model, copies = model_class(config, kernels=Kernels(experts="reference")), Copies(stream or Recorded())
    finally:
        torch.set_default_dtype(torch.float32)
    init_weights(model, seed=0, std=0.2, num_layers=config.num_layers)
    borders = recompute.borders(model, recompute_of(recipe)) | offload.borders(model, offload_of(recipe))
    regional.apply(model, CompileConfig(regional_graphs), torch.device("cpu"), borders)
    scopes = {layer: Scope() for layer in model.layers}
    recompute.apply(model, recompute_of(recipe), scopes)
    offload.apply(model, offload_of(recipe), copies, scopes)
    return model, copies


def gradients(model: Transformer) -> Tensor:
    model(TOKENS, LABELS).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("config", [CONFIG, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize(
    ("offloaded", "recomputed"),
    [
        (ALL, ()),
        (("block",), ()),
        (("attention:1", "block:-2", "ffn_norm:1-2"), ()),
        (("block", "ffn_norm", "attention"), ("norms", "experts")),
        (("block:1",), ("qkv_rope", "mla_up", "block:-2")),
    ],
)
def test_gradients_are_the_same_bits(offloaded: Sequence[str], recomputed: Sequence[str], config: ModelConfig) -> None:
    (plain, _), (model, copies) = build(config=config), build(offloaded, recomputed, config)
    assert torch.equal(gradients(model), gradients(plain))
    assert copies.places.num_bytes > 0


def test_the_gpu_lets_go_of_tensors_two_blocks_later() -> None:
    """And has those of two blocks in backward. Streams are saved by norms alone."""
    model, _ = build(("block", "ffn_norm"))
    alive = WeakSet[Tensor]()
    seen: list[int] = []

    def look(_: Any, args: tuple[Tensor, ...]) -> None:
        alive.add(args[0].untyped_storage())
        seen.append(len(alive))

    for block in model.layers.values():
        block.attention_norm.register_forward_pre_hook(look)
        block.ffn_norm.register_forward_pre_hook(look)
    loss = model(TOKENS, LABELS)
    assert seen == [1, 2, 3, 4, 3, 4, 3, 4], "the first two blocks' are gone when the third and fourth have begun"
    assert len(alive) == 4
    loss.backward()
    assert not alive


@pytest.mark.parametrize(("offloaded", "recomputed"), [(ALL, ()), ((), ("norms", "experts"))])
def test_steps_leave_no_tensors(offloaded: Sequence[str], recomputed: Sequence[str]) -> None:
    """Nor nodes of scores that no loss reads, whose backward never runs."""
    model, _ = build(offloaded, recomputed)

    def num_alive() -> int:
        gradients(model)
        gc.collect()
        return sum(issubclass(type(it), Tensor) for it in gc.get_objects())

    num_alive()
    assert num_alive() == num_alive()


def test_places_of_the_host_are_used_again() -> None:
    """By each step, and of microbatches in flight each has its own; what is never read returns them too."""
    model, copies = build(ALL)
    plain, _ = build()
    gradients(model)
    num_bytes = copies.places.num_bytes
    for each in (model, plain):
        each.zero_grad()
        first, second = each(TOKENS, LABELS), each(LABELS, TOKENS)
        each.layers["0"].attention_norm(torch.zeros(1, 16, dtype=torch.float64)).sum().backward()
        first.backward()
        second.backward()
    in_flight = copies.places.num_bytes
    assert in_flight == 2 * num_bytes
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    del first, second
    model(TOKENS, LABELS)
    model(LABELS, TOKENS)
    assert copies.places.num_bytes == in_flight


def test_copies_run_ahead_of_what_reads_them() -> None:
    """Of four blocks with one tensor each: forward waits for a copy two blocks later, and backward asks for the tensor
    of a block when it comes to the one behind it. A place is used again only after its last copy."""
    model, copies = build(("block",))
    loss = model(TOKENS, LABELS)
    places = {place: name for name, (what, place) in enumerate(it for it in copies.stream.said if it[0] == "out")}

    def said() -> list[str]:
        words = [f"{what} {places[place]}" for what, place in copies.stream.said]
        copies.stream.said.clear()
        return words

    assert said() == ["out 0", "out 1", "wait out 0", "out 2", "wait out 1", "out 3"]
    loss.backward()
    assert said() == ["wait out 3", "in 1", "wait out 2", "in 0", "wait in 1", "wait in 0"]


def test_the_table_of_modules_counts_what_goes() -> None:
    """But for log-sum-exp, and values in a projection that the norm of queries and keys holds on this device."""
    model, copies = build(ALL)
    sizes: list[int] = []
    copies.places.take = lambda size, take=copies.places.take: sizes.append(size) or take(size)
    model(TOKENS, LABELS)
    counted = sum(row.sent_with(ALL) * row.number for row in modules_of(CONFIG)) * TOKENS.numel()
    lse, values = CONFIG.num_layers * TOKENS.numel() * 2, CONFIG.num_layers * TOKENS.numel() * 8
    assert sum(sizes) / 8 == counted + lse - values


def test_tensors_leave_and_come_back_while_other_blocks_run() -> None:
    """Also those of which the host keeps nothing: it has the first two, and the last computes again."""
    model, copies = build(("block:2",), ("block:-1",))
    seen: list[int] = []
    model.layers["2"].attention_norm.weight.register_hook(lambda _: seen.append(len(copies.stream.said)))
    loss = model(TOKENS, LABELS)
    assert [what for what, _ in copies.stream.said] == ["out", "out", "wait out", "wait out"]
    loss.backward()
    assert [what for what, _ in copies.stream.said[4:]] == ["in", "in", "wait in", "wait in"]
    assert seen == [5], "the second has come back during the third's backward"
    model.zero_grad()
    plain, _ = build()
    assert torch.equal(gradients(model), gradients(plain))


def test_masks_stay() -> None:
    """A layer's mask is as large as all queries of many heads."""
    model, copies = build(("attention",))
    tokens, labels = TOKENS[:, :6], LABELS[:, :6]
    sizes: list[int] = []
    copies.places.take = lambda size, take=copies.places.take: sizes.append(size) or take(size)
    for ids in (None, torch.arange(6).div(3, rounding_mode="floor").int().expand(2, 6)):
        model(tokens, labels, ids)
        assert set(sizes) <= {8 * 2 * 6 * width for width in (2, 8, 16)}, "log-sum-exp, keys, and queries or result"
        sizes.clear()


@pytest.mark.parametrize("offloaded", [ALL, ("attention:2", "block:-3")])
def test_copies_may_run_as_late_as_they_are_waited_for(offloaded: Sequence[str]) -> None:
    """Places are not written before they are read, nor tensors freed or read too early; also with two in flight."""
    (plain, _), (model, copies) = build(), build(offloaded, stream=Late())
    for _ in range(2):
        for each in (plain, model):
            first, second = each(TOKENS, LABELS), each(LABELS, TOKENS)
            first.backward()
            third = each(TOKENS.flip(0), LABELS)
            second.backward()
            third.backward()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    assert copies.stream.num_done == len(copies.stream.waiting) > 0, "the streams have met"


def test_nothing_is_copied_where_nothing_is_saved() -> None:
    model, copies = build(ALL)
    with torch.no_grad():
        model(TOKENS, LABELS)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model(TOKENS, LABELS)
    assert copies.stream.said == [] and copies.places.num_bytes == 0


def test_a_users_block_has_the_parts_that_it_has() -> None:
    class Own(nn.Module):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16)

        def forward(self, x_BND: Tensor, context: Any) -> Tensor:
            return x_BND + self.norm(x_BND)

    model, copies = build(ALL, block_class=Own)
    plain, _ = build(block_class=Own)
    assert torch.equal(gradients(model), gradients(plain))
    assert [what for what, _ in copies.stream.said].count("out") == CONFIG.num_layers


def test_a_graph_of_the_compiler_ends_where_a_tensor_leaves() -> None:
    model, _ = build()
    own = offload.borders(model, offload_of(recipe_of(("attention:1", "ffn_norm:-1"))))
    first, last = model.layers["0"], model.layers["3"]
    assert own == {(first.attention.out, "forward"), (last.ffn_norm, "forward")}


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", [(), ("norms",)])
def test_graphs_of_the_compiler_save_the_same_tensors(recomputed: Sequence[str]) -> None:
    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        model, copies = build(ALL, recomputed, regional_graphs="on")
        actual = gradients(model)
    plain, in_eager = build(ALL)
    torch.testing.assert_close(actual, gradients(plain), rtol=1e-9, atol=1e-12)
    numbers = [[what for what, _ in each.stream.said].count("out") for each in (copies, in_eager)]
    assert numbers == [6 * CONFIG.num_layers] * 2


def test_chunks_of_the_host_hold_several_places() -> None:
    sizes: list[int] = []
    places = Places(lambda size: sizes.append(size) or torch.empty(size, dtype=torch.uint8, device="meta"))
    taken = [places.take(size) for size in (100, 2**27, 2**27 + 2**26, 2**29 + 1)]
    assert [len(place) for place in taken] == [100, 2**27, 2**27 + 2**26, 2**29 + 1]
    assert sizes == [CHUNK_BYTES, CHUNK_BYTES, 2**30], "the rest of a chunk is not used once another one is begun"
    places.give_back(taken[1])
    assert places.take(2**27) is taken[1]
