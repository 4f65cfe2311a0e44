"""Tunables of `titan-moe tune`: every operation that a recipe chooses, at its shape, as its layer runs it.

Triton candidates run on `meta` tensors.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from support.kernel_samples import as_tuple
from torch import Tensor

from titan_moe.config import Recipe, load_recipe
from titan_moe.config.kernels import DEFAULT_KERNELS, KernelOverrides, Kernels
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import smallest_world
from titan_moe.kernels.loss.cross_entropy import linear_cross_entropy
from titan_moe.kernels.registry import Sample, Tunable, load_all
from titan_moe.layers.attention import GroupedQueryAttention
from titan_moe.layers.head import LanguageModelHead
from titan_moe.layers.router import TopKRouter
from titan_moe.plan.kernel_shapes import shapes_of

RECIPES = Path(__file__).parents[2] / "recipes"
CPU, META = torch.device("cpu"), torch.device("meta")
TUNABLES = {kernel.tunable.operation: kernel.tunable for kernel in load_all().values() if kernel.tunable}
VARIANTS = [
    "",
    "--model.moe.aux_loss_coef=0 --model.moe.normalize_topk=false --model.attention.qk_norm=false "
    "--compile.extent=block",
    "--model.moe.num_experts=16 --model.moe.num_groups=4 --model.moe.top_k_groups=2 --model.moe.z_loss_coef=1e-3 "
    "--model.moe.score_fn=sigmoid --model.attention.rope_is_interleaved=true --perf.loss_chunk_tokens=0",
]


def tiny(*overrides: str) -> Recipe:
    words = [
        "--run.device=auto",
        "--precision.compute=bf16",
        "--train.seq_len_tokens=16",
        "--perf.loss_chunk_tokens=32",
    ]
    return load_recipe(RECIPES / "quickstart.toml", [*words, "--train.micro_batch_sequences=4", *overrides])


def world_size(recipe: Recipe) -> int:
    return smallest_world(recipe.parallel)


def drawn(operation: str, recipe: Recipe, device: torch.device) -> Sample:
    torch.manual_seed(0)
    return TUNABLES[operation].draw(shapes_of(recipe, world_size(recipe))[operation], device)


def evaluate(op: Callable[..., Any], sample: Sample) -> list[Tensor]:
    """Outputs, and the gradients of the leading inputs through all differentiable outputs."""
    inputs = [x.detach().requires_grad_() for x in sample.args[: sample.num_differentiable]]
    outputs = as_tuple(op(*inputs, *sample.args[len(inputs) :]))
    differentiable = [out for out in outputs if out.requires_grad]
    grads = (
        torch.autograd.grad(differentiable, inputs, [torch.ones_like(out) for out in differentiable]) if inputs else ()
    )
    return [*(out.detach() for out in outputs), *grads]


def described(results: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(x.shape, x.dtype) for x in results]


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with aot_eager: graph breaks matter here, generated code does not."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()


def test_tunables_cover_every_kernel_choice_of_a_recipe() -> None:
    assert TUNABLES.keys() == {field.name for field in fields(KernelOverrides)}
    backends = get_type_hints(Kernels)
    for operation, tunable in TUNABLES.items():
        assert set(tunable.candidates) == set(get_args(backends[operation])) - {"reference"}
        assert getattr(DEFAULT_KERNELS, operation) in tunable.candidates


@pytest.mark.parametrize("overrides", VARIANTS)
@pytest.mark.parametrize("operation", TUNABLES)
def test_tunable_candidates_return_equal_shapes(operation: str, overrides: str, without_inductor: None) -> None:
    recipe, tunable = tiny(*overrides.split()), TUNABLES[operation]
    shapes = shapes_of(recipe, world_size(recipe))
    if operation not in shapes:
        assert operation == "gradients" and recipe.compile.extent == "block", "a block's graph accumulates them"
        return
    shape, default = shapes[operation], tunable.candidates[getattr(DEFAULT_KERNELS, operation)]
    expected = evaluate(default, drawn(operation, recipe, CPU))
    assert all(x.isfinite().all() for x in expected)
    for op in tunable.candidates.values():
        for timed in (op, tunable.compiled(op, shape)):
            assert described(evaluate(timed, drawn(operation, recipe, META))) == described(expected)
    compiled = evaluate(tunable.compiled(default, shape), drawn(operation, recipe, CPU))
    torch.testing.assert_close(compiled, expected)


def sizes(operation: str, recipe: Recipe) -> list[Any]:
    return [tuple(x.shape) if isinstance(x, Tensor) else x for x in drawn(operation, recipe, META).args]


def test_tunable_samples_have_the_shapes_of_the_recipe() -> None:
    qwen3 = load_recipe(RECIPES / "qwen3_30b_a3b.toml", ["--train.micro_batch_sequences=2"])
    (rows, choices), *_ = sizes("permute", qwen3)
    assert (
        choices == 8 and rows == shapes_of(qwen3, 8)["permute"]["rows"] and sizes("permute", qwen3)[2:] == [16, 65_536]
    )
    assert sizes("router", qwen3)[:3] == [(2, 4096, 2048), (128, 2048), (128,)]
    assert sizes("router", qwen3)[4:] == [True, False], "with an auxiliary loss, without a z-loss"
    assert sizes("rotary", qwen3)[:5] == [(2, 4096, 5120), (128,), (128,), (4096, 64), (4096, 64)]
    assert sizes("head", qwen3) == [(8192, 2048), (151_936, 2048), (8192,), 4096]
    (x, scores, gate_up, down, slots, *_) = sizes("experts", qwen3)
    assert sizes("gradients", qwen3) == [(16 * 2 * 768 * 2048,)] * 2
    assert (x, scores, gate_up, down) == ((rows, 2048), (rows, 8), (16, 2, 768, 2048), (16, 2048, 768))
    assert slots == (65_536,)


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "mixtral_8x7b", "qwen3_30b_a3b"])
def test_tunable_candidates_take_the_samples_of_recipes(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    for operation in shapes_of(recipe, world_size(recipe)):
        sample = drawn(operation, recipe, META)
        first, *others = [described(evaluate(op, sample)) for op in TUNABLES[operation].candidates.values()]
        assert all(other == first for other in others)


def model_of(operation: str, overrides: str) -> tuple[ModelConfig, Tunable, Sample]:
    recipe = tiny(*overrides.split())
    return recipe.model, TUNABLES[operation], drawn(operation, recipe, CPU)


@pytest.mark.parametrize("overrides", VARIANTS)
def test_router_tunable_equals_its_layer(overrides: str) -> None:
    config, tunable, sample = model_of("router", overrides)
    x_BND, weight_ED, *_ = sample.args
    router = TopKRouter(config)
    router.weight, seen = torch.nn.Parameter(weight_ED), []
    router.balance.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    router.expert_bias_E.zero_()
    router(x_BND)
    timed = tunable.candidates["torch"](*sample.args)
    torch.testing.assert_close(list(timed), list(seen[0]))


def test_rotary_tunable_equals_its_layer() -> None:
    config, tunable, _ = model_of("rotary", "")
    for backend, norm_and_rotate in tunable.candidates.items():
        assert GroupedQueryAttention(config, Kernels(rotary=backend)).qk_norm_rope.norm_and_rotate is norm_and_rotate


def test_head_tunable_equals_its_layer() -> None:
    for backend, cross_entropy in TUNABLES["head"].candidates.items():
        assert LanguageModelHead(8, 16, 4, backend).cross_entropy is cross_entropy


def test_gradients_tunable_overwrites_then_adds() -> None:
    recipe, gradients = tiny(), TUNABLES["gradients"]
    for backend, add in gradients.candidates.items():
        total, addend = drawn("gradients", recipe, CPU).args
        assert (total.dtype, addend.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(add(total.fill_(torch.nan), addend), 2 * addend.float()) and backend in ("torch", "triton")


def test_eager_tunables_are_timed_eagerly() -> None:
    for op in TUNABLES["gradients"].candidates.values():
        assert TUNABLES["gradients"].compiled(op, {}) is op
    slots, head = TUNABLES["permute"], TUNABLES["head"]
    for op in slots.candidates.values():
        assert slots.compiled(op, shapes_of(tiny(), 1)["permute"]) is op
        assert slots.compiled(op, shapes_of(tiny("--compile.extent=block"), 1)["permute"]) is not op
    compiled = head.compiled(linear_cross_entropy, {})
    assert compiled.func is linear_cross_entropy and set(compiled.keywords) == {"softmax"}
    assert head.compiled(head.candidates["triton"], {}) is head.candidates["triton"]
