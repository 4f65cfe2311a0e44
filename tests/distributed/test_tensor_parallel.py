"""Tensor parallelism: checkpoints and initial weights do not depend on it; what it splits, and what it refuses.

test_one_loss.py has its gradients and losses.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import load
from support.checkpoint_case import Cursor
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_moe.checkpoint.dcp import Checkpointer
from titan_moe.config import Recipe, check_rules
from titan_moe.config.context import sequence_shard
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.train import CheckpointConfig, RunConfig
from titan_moe.data.loader import build_loader
from titan_moe.parameters import full_tensor, fused_rows
from titan_moe.plan.choice.formats import choose_formats
from titan_moe.training.build import assemble
from titan_moe.training.evaluate import evaluating, validation_loss

one_loss = load("distributed/test_one_loss")
CPU = torch.device("cpu")
TP2_EP2 = ParallelConfig(tp=2, ep=2, dispatcher="alltoall")
TP4 = ParallelConfig(tp=4)


def state_of(built: Any) -> dict[str, Tensor]:
    """All parameters, moments and buffers of this rank's stages as full tensors. Copies of a tied weight have the same
    values. Collective."""
    rows = {name: sizes for part in built.parts for name, sizes in fused_rows(part).items()}
    tensors: dict[str, Tensor] = {}
    for name, tensor in tensors_of(built):
        weight = name.removeprefix("state.").rpartition(".")[0] if name.startswith("state.") else name
        full = full_tensor(tensor.detach(), rows.get(weight, ()))
        assert torch.equal(tensors.setdefault(name, full.clone()), full), f"copies of {name} differ"
    assert tensors.keys() >= built.optimizers.state_dict().keys()
    return tensors


def tensors_of(built: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of every stage of this rank by name, copies too."""
    for part in built.parts:
        yield from part.state_dict().items()
    for part, optimizer in zip(built.optimizers.model_parts, built.optimizers, strict=True):
        for name, parameter in part.named_parameters():
            for key, value in optimizer.state[parameter].items():
                yield f"state.{name}.{key}", value


class Run:
    """A rank's model, data and checkpoints."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.built = assemble(recipe, CPU)
        meshes = self.built.meshes
        shard = sequence_shard(recipe.parallel, meshes.context_rank)
        self.loader = build_loader(recipe, meshes.data_rank, meshes.sizes.dp, folder, dist.barrier, shard)
        states = self.built.optimizers, self.built.schedule, self.loader, Cursor()
        self.checkpointer = Checkpointer(recipe, folder, self.built.parts, *states)

    def train_and_save(self, first: int, last: int) -> dict[str, Tensor]:
        """Take steps and save; the state."""
        for _ in range(first, last + 1):
            self.built.step(self.loader.next_step())
        self.checkpointer.save(last)
        self.checkpointer.close()
        return self.state()

    def load(self) -> dict[str, Tensor]:
        """Load into a model whose every value is another; the state."""
        with torch.no_grad():
            for parameter in self.built.optimizers.parameters:
                parameter.fill_(7.0)
        assert self.checkpointer.load()
        return self.state()

    def state(self) -> dict[str, Tensor]:
        return state_of(self.built) | {"next_sample": torch.tensor(self.loader.state_dict()["next_sample"])}


def save(recipe: Recipe, folder: Path) -> dict[str, Tensor]:
    """Take two steps and save; the state."""
    return Run(recipe, folder).train_and_save(1, 2)


def resume(recipe: Recipe, folder: Path) -> dict[str, Tensor]:
    """The state of the newest checkpoint."""
    run = Run(recipe, folder)
    state = run.load()
    run.checkpointer.close()
    return state


def resume_and_save(recipe: Recipe, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of the newest checkpoint, and that of the next step, which is saved."""
    run = Run(recipe, folder)
    return run.load(), run.train_and_save(3, 3)


def assert_same_state(loaded: list[dict[str, Tensor]], saved: dict[str, Tensor]) -> None:
    """Every rank has loaded the same bits."""
    assert len(saved) > 60 and saved["next_sample"] > 0
    for state in loaded:
        assert saved.keys() == state.keys()
        for name, value in saved.items():
            assert torch.equal(state[name], value), name


@pytest.mark.few("1-to-tp2")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "num_later", "later", "is_async"),
    [
        pytest.param(1, ParallelConfig(), 2, TP2_EP2, False, id="1-to-tp2"),
        pytest.param(4, replace(TP2_EP2, ep=4), 4, TP4, True, id="tp2-dp2-to-tp4-async"),
    ],
)
def test_tensor_parallel_checkpoints_load_bit_for_bit_on_other_layouts(
    ranks, tmp_path: Path, num_ranks: int, parallel: ParallelConfig, num_later: int, later: ParallelConfig, is_async
) -> None:
    config = CheckpointConfig(is_async=is_async)
    before, after = (one_loss.split_recipe(p, "gqa", checkpoint=config) for p in (parallel, later))
    saved = ranks(num_ranks, save, before, tmp_path)[0]
    assert_same_state(ranks(num_later, resume, after, tmp_path), saved)


def of_threes(parallel: ParallelConfig) -> Recipe:
    """A model that 2, 3 and 4 ranks divide, and sequences of 24 tokens."""
    attention = replace(one_loss.GQA, num_heads=12, num_kv_heads=6)
    moe = replace(one_loss.MOE, num_experts=12, shared_ffn_hidden_size=12)
    sizes = {"vocab_size": 48, "hidden_size": 24, "ffn_hidden_size": 24}
    model = replace(one_loss.MODEL, attention=attention, moe=moe, **sizes)
    base = one_loss.split_recipe(parallel, "gqa", checkpoint=CheckpointConfig(is_async=False))
    return replace(base, model=model, train=replace(base.train, seq_len_tokens=24, micro_batch_sequences=2))


@pytest.mark.few()
def test_checkpoints_load_bit_for_bit_on_8_then_1_then_6_ranks(ranks, tmp_path: Path) -> None:
    on_8 = of_threes(ParallelConfig(dp_replicate=2, tp=2, ep=4, dispatcher="alltoall"))
    on_6 = of_threes(ParallelConfig(cp=3, tp=2, ep=3, dispatcher="alltoall"))
    assert not check_rules(on_8, 8) + check_rules(on_6, 6)
    saved = ranks(8, save, on_8, tmp_path)
    loaded, saved_by_one = ranks(1, resume_and_save, of_threes(ParallelConfig()), tmp_path)[0]
    assert_same_state([*saved, loaded], saved[0])
    assert saved_by_one["next_sample"] == 24 and loaded["next_sample"] == 16
    assert_same_state(ranks(6, resume, on_6, tmp_path), saved_by_one)


def describe(recipe: Recipe) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]], float, Tensor]:
    """Initial state, local shapes of parameters, the loss of a validation, and tokens that are generated with a cache
    and without."""
    built = assemble(recipe, CPU)
    state, parameters = state_of(built), {n: p for part in built.parts for n, p in part.named_parameters()}
    shapes = {name: tuple(p.to_local().shape) for name, p in parameters.items() if isinstance(p, DTensor)}
    batch = one_loss.batch_of(0, recipe.train.micro_batch_sequences, built.meshes, parallel=recipe.parallel)
    loss = validation_loss(built.model, built.parts, [batch], CPU, built.meshes).item()
    with evaluating(built.parts):
        prompts = torch.arange(6).view(2, 3)  # lengths that do not divide by 4, too
        tokens = torch.cat([built.model.generate(prompts, 4, use_cache=keeps) for keeps in (True, False)])
    return state, shapes, loss, tokens


def test_tensor_parallel_ranks_keep_parts_of_the_same_initial_weights_and_generate_the_same(ranks) -> None:
    whole, _, loss, tokens = ranks(1, describe, one_loss.split_recipe(ParallelConfig(), "gqa"))[0]
    for state, shapes, split_loss, split_tokens in ranks(4, describe, one_loss.split_recipe(replace(TP4, ep=1), "gqa")):
        assert state.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(state[name], value), name
        assert shapes["layers.0.attention.qkv.weight"] == (32, 16)  # 2 of 8 query heads, 1 of 4 keys and values
        assert shapes["layers.0.attention.out.weight"] == (16, 16)
        assert shapes["layers.0.feed_forward.gate_up.weight"] == (8, 16)
        assert shapes["layers.1.feed_forward.shared_experts.down.weight"] == (16, 2)
        assert shapes["embed.weight"] == shapes["head.weight"] == (8, 16)
        assert shapes["layers.1.feed_forward.router.weight"] == (8, 16)
        assert torch.equal(split_tokens, tokens)
        assert split_loss == pytest.approx(loss, rel=1e-12)


class AllReduces(TorchDispatchMode):
    """Shapes of the tensors that are all-reduced, of functional collectives too."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allreduce" in str(func).replace("_", ""):
            self.shapes += [tuple(tensor.shape) for tensor in tree_leaves(args[0])]
        return func(*args, **(kwargs or {}))


def count_messages(recipe: Recipe) -> tuple[int, int, int]:
    """Of a step: all-reduces of the shape of a replicated parameter, those of the size of all shards of them, and the
    shards."""
    built = assemble(recipe, CPU)
    parameters = [p for part in built.parts for p in part.parameters() if isinstance(p, DTensor)]
    replicated = [p for p in parameters if "tp" in p.device_mesh.mesh_dim_names and p.placements[-1].is_replicate()]
    shapes = {tuple(shape) for p in replicated for shape in (p.shape, p.to_local().shape)}
    num_elements = sum(p.to_local().numel() for p in replicated)
    batch = one_loss.batch_of(0, recipe.train.micro_batch_sequences, built.meshes, parallel=recipe.parallel)
    with AllReduces() as seen:
        built.step.step.forward_backward(batch, torch.tensor(0.1, dtype=torch.float64))
        built.step.step.finish_gradients()
    return sum(shape in shapes for shape in seen.shapes), seen.shapes.count((num_elements,)), len(replicated)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(tp=2), id="tp2-dp2"),
        pytest.param(ParallelConfig(tp=2, accumulate_unsharded=True), id="tp2-dp2-unsharded"),
        pytest.param(ParallelConfig(tp=4), id="tp4-shared_heads"),
        pytest.param(ParallelConfig(tp=2, pp=2, pp_schedule="zbv", accumulate_unsharded=True), id="tp2-pp2-zbv"),
    ],
)
def test_gradients_of_replicated_parameters_are_one_message_a_step(ranks, parallel: ParallelConfig) -> None:
    """Not one for each parameter and microbatch, of which a step has two or four."""
    if parallel.pp > 1:
        parallel = replace(parallel, vpp=2)
    recipe = one_loss.split_recipe(parallel, "gqa-shared")
    recipe = replace(
        recipe,
        model=replace(recipe.model, num_layers=4),
        train=replace(recipe.train, micro_batch_sequences=2),
    )
    for num_singly, num_together, num_parameters in ranks(4, count_messages, recipe):
        assert num_parameters > 5
        assert (num_singly, num_together) == (0, 1)


WIDE = replace(one_loss.MODEL, hidden_size=64, ffn_hidden_size=64)
WIDE_MODELS = {
    "gqa": replace(WIDE, attention=replace(one_loss.GQA, head_dim=16)),
    "gqa-256": replace(
        WIDE, hidden_size=128, ffn_hidden_size=256, attention=replace(one_loss.GQA, head_dim=32, sinks=False)
    ),
    "mla": replace(
        WIDE,
        attention=replace(
            one_loss.MLA, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=64, q_lora_rank=32
        ),
    ),
}
"""Models whose linear layers have widths for formats on any of two ranks, with 256 also for blocks of 128."""
FP32 = replace(one_loss.FP64, compute="fp32", master="fp32", reduce="fp32")
NOISE = {"nvfp4": (0.1, 0.9, 0.1)}
NOISE_OF_FP8 = (1e-2, 0.3, 2e-2)
"""Relative noise of gradients, at least and at most, and of the loss at most."""
OF_BLOCKS = ("fp8_blockwise", "mxfp8")
"""Formats whose blocks divide the part of a rank: it rounds as one process does."""


def in_format(name: str, kind: str, layout: ParallelConfig) -> Recipe:
    """A recipe whose linear layers have a format ("compute" for none)."""
    precision = replace(FP32, linears=name, backend="emulated")
    if name == "fp8_blockwise":  # its weight gradients need 128 tokens
        precision = replace(precision, wgrad="compute")
    base = one_loss.split_recipe(layout, "gqa", precision=precision if name != "compute" else FP32)
    train = replace(base.train, micro_batch_sequences=one_loss.SEQUENCES)
    wide = WIDE_MODELS[kind]  # without balancing losses: with them one value is at a border between two codes
    model = replace(wide, moe=replace(wide.moe, aux_loss_coef=0.0, z_loss_coef=0.0))
    return replace(base, model=model, train=train if layout.pp == 1 else base.train)


@pytest.fixture(scope="module")
def one_step_alone(ranks) -> Any:
    """The first step of one process, by format and model."""
    return cache(lambda *names: one_loss.run(ranks, 1, in_format(*names, ParallelConfig()), -1, 1)[0])


@pytest.mark.parametrize(
    ("name", "kind", "parallel"),
    [
        pytest.param("fp8_rowwise", "gqa", TP2_EP2, id="fp8_rowwise-tp2-ep2-gqa"),
        pytest.param("fp8_tensorwise", "gqa", TP2_EP2, id="fp8_tensorwise-tp2-ep2-gqa"),
        pytest.param("fp8_blockwise", "gqa-256", TP2_EP2, id="fp8_blockwise-tp2-ep2-gqa"),
        pytest.param("mxfp8", "gqa", TP2_EP2, id="mxfp8-tp2-ep2-gqa"),
        pytest.param("nvfp4", "gqa", TP2_EP2, id="nvfp4-tp2-ep2-gqa"),
        pytest.param("fp8_tensorwise", "mla", replace(TP2_EP2, tp=1, cp=2), id="fp8_tensorwise-cp2-ep2-mla"),
        pytest.param("nvfp4", "mla", replace(TP2_EP2, tp=1, cp=2), id="nvfp4-cp2-ep2-mla"),
        pytest.param("mxfp8", "gqa", ParallelConfig(pp=2), id="mxfp8-pp2-gqa"),
    ],
)
def test_formats_agree_on_layouts_to_their_noise(
    ranks, one_step_alone: Any, name: str, kind: str, parallel: ParallelConfig
) -> None:
    """A rank rounds its part of a row or tensor with a scale of its own."""
    recipe = in_format(name, kind, parallel)
    assert not check_rules(replace(recipe, run=RunConfig(device="cpu")), 2)
    kept = {choice.module.path for choice in choose_formats(recipe, None) if choice.reason}
    assert not {path for path in kept if path.startswith("attention")}
    exact, alone = one_step_alone("compute", kind), one_step_alone(name, kind)
    split, _ = one_loss.run(ranks, 2, recipe, -1, 1)
    least, most, most_of_loss = NOISE.get(name, NOISE_OF_FP8)
    projection = "kv_up" if kind == "mla" else "qkv"
    for weight in (f"layers.0.attention.{projection}.weight", "layers.0.feed_forward.gate_up.weight", "embed.weight"):
        noises = [distance(grads[weight], exact.grads[weight]) for grads in (alone.grads, split.grads)]
        assert all(least < noise < most for noise in noises), (weight, noises)
        assert 0.5 < noises[1] / noises[0] < 2, (weight, noises)
        assert name not in OF_BLOCKS or distance(split.grads[weight], alone.grads[weight]) < 1e-5, weight
    assert split.losses[0] == pytest.approx(exact.losses[0], rel=most_of_loss)


def distance(one: Tensor, other: Tensor) -> float:
    """Relative, of all elements together."""
    return float((one - other).norm() / other.norm())
