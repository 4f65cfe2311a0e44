"""QK-clip: logits that are written out, heads that are at the threshold after a clip, and the same on every layout."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.config import Recipe
from titan_moe.config.mtp import MTPConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig, MemoryConfig
from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.config.train import OptimConfig
from titan_moe.layers.max_logits import LargestLogits, MeasuredAttention
from titan_moe.parameters import full_tensor, fused_rows
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")

STEPS, CPU = 3, torch.device("cpu")
CLIP = QKClipConfig(threshold=0.25, alpha=0.3)
OPTIM = OptimConfig(lr=1e-2, max_grad_norm=0.5, qk_clip=CLIP)
STILL = replace(OPTIM, lr=1e-300, weight_decay=0.0)
"""Weights change by the clip alone."""
ALONE, TP2, CP2 = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(cp=2)


def recipe(parallel: ParallelConfig, name: str, optim: OptimConfig = OPTIM, **changes: Any) -> Recipe:
    """Without norms of queries and keys; models with "-deep" have a layer more, with "-mtp" one that predicts ahead."""
    of_model = name.removesuffix("-deep").removesuffix("-mtp")
    base: Recipe = one_loss.split_recipe(parallel, of_model, optim=optim, **changes)
    model = replace(base.model, attention=replace(base.model.attention, qk_norm=False))
    model = replace(model, num_layers=model.num_layers + name.endswith("-deep"))
    model = replace(model, mtp=MTPConfig(1, 0.3)) if name.endswith("-mtp") else model
    return replace(base, model=model, train=replace(base.train, micro_batch_sequences=2))


def train(run: Recipe, num_steps: int = STEPS) -> dict[str, Any]:
    """Logits, clipped heads, losses of each step, and the projections at the end."""
    built = assemble(run, CPU)
    result: dict[str, Any] = {"loss": [], "max_attention_logit": [], "clipped_heads": [], "logits": [], "weights": {}}
    for step in range(num_steps):
        batch = one_loss.batch_of(
            0 if run.optim.lr == STILL.lr else step, 2, built.meshes,
            has_documents=run.data.document_attention, parallel=run.parallel,
        )  # fmt: skip
        measured = [it for part in built.parts for it in part.modules() if isinstance(it, LargestLogits)]
        for largest in measured:
            largest.logits_H.fill_(1e9)  # nothing goes from a step to the next, so a resume needs nothing
        metrics = built.step(batch).metrics
        for name in ("loss", "max_attention_logit", "clipped_heads"):
            result[name].append(metrics[name].item())
        result["logits"].append(torch.stack([it.logits_H for it in measured]))
    for part in built.parts:
        rows = fused_rows(part)
        for name, parameter in part.named_parameters():
            if name.rpartition(".")[0].endswith(("qkv", "q_up", "kv_up")):
                result["weights"][name] = full_tensor(parameter.detach(), rows.get(name, ())).clone()
    return result


def train_compiled(run: Recipe) -> dict[str, Any]:
    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return train(run)


def logits_by_hand(run: Recipe) -> tuple[Tensor, Tensor]:
    """What a step of one process measures, and what its queries and keys give: [layers, heads] each."""
    largest: dict[int, Tensor] = {}
    attend = MeasuredAttention.__call__

    def recorded(self: MeasuredAttention, q: Tensor, k: Tensor, v: Tensor, context: Any, scale: float, *s: Any) -> Any:
        logits = torch.einsum("bqhd,bkhd->hbqk", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
        places = torch.arange(q.shape[1])
        hidden = places[:, None] < places if context.mask is None else ~context.mask[:, 0]
        own = logits.masked_fill(hidden, -torch.inf).amax((1, 2, 3)).detach()
        largest[id(self)] = torch.maximum(own, largest.get(id(self), own))
        return attend(self, q, k, v, context, scale, *s)

    with mock.patch.object(MeasuredAttention, "__call__", recorded):
        measured = train(run, 1)["logits"][0]
    return measured, torch.stack(list(largest.values()))


@pytest.mark.few("gqa-window")
@pytest.mark.parametrize("name", ["gqa-window", "mla"])
def test_logits_are_those_by_hand(ranks: Any, name: str) -> None:
    """Over documents, windows and microbatches."""
    measured, expected = ranks(1, logits_by_hand, recipe(ALONE, name))[0]
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.few("gqa", "mla")
@pytest.mark.parametrize("name", ["gqa", "mla", "mla-latent-gate"])
def test_heads_are_at_the_threshold_after_a_clip(ranks: Any, name: str) -> None:
    """In the first layer, which gets the same inputs again. Heads that share keys have the factor of the largest."""
    shared = 1 if name.startswith("mla") else 2

    def largest_of_keys(logits_H: Tensor) -> Tensor:
        return logits_H.unflatten(-1, (-1, shared)).amax(-1).repeat_interleave(shared, -1)

    unclipped = replace(STILL, qk_clip=QKClipConfig(1e6))
    threshold = largest_of_keys(ranks(1, train, recipe(ALONE, name, unclipped), 1)[0]["logits"][0][0]).mean().item()
    clip = replace(STILL, qk_clip=QKClipConfig(threshold, alpha=0.3))
    result = ranks(1, train, recipe(ALONE, name, clip), 2)[0]
    before_H, after_H = (logits_LH[0] for logits_LH in result["logits"])
    largest_H = largest_of_keys(before_H)
    assert 0 < (largest_H > threshold).sum() < len(largest_H)
    torch.testing.assert_close(after_H, before_H * (threshold / largest_H).clamp(max=1.0), rtol=1e-9, atol=1e-9)
    assert torch.equal(after_H[largest_H <= threshold], before_H[largest_H <= threshold])
    assert result["max_attention_logit"][0] == pytest.approx(result["logits"][0].max().item())
    assert result["clipped_heads"][0] == int((largest_of_keys(result["logits"][0]) > threshold).sum())


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Callable[..., Any]:
    """One process, by the name of a model and whether it has documents."""

    def trained(name: str, has_documents: bool) -> Any:
        run = recipe(ALONE, name)
        return ranks(1, train, replace(run, data=replace(run.data, document_attention=has_documents)))[0]

    return cache(trained)


UNSHARDED = replace(TP2, ep=2, dispatcher="alltoall", accumulate_unsharded=True, overlap="microbatch")
LAYOUTS: dict[str, tuple[int, ParallelConfig, str, dict[str, Any]]] = {
    "dp2-gqa": (2, ALONE, "gqa", {}),
    "tp2-gqa-window-offloaded": (2, TP2, "gqa-window", {"memory": one_loss.OFFLOADED}),
    "tp2-mla-recompute_parts": (2, TP2, "mla", {"memory": one_loss.OF_MLA}),
    "tp4-gqa-shared": (4, replace(TP2, tp=4), "gqa-shared", {}),
    "tp2-dp_replicate2-recompute_block": (4, replace(TP2, dp_replicate=2), "mla", {"memory": MemoryConfig("block")}),
    "tp2-dp2-interleaved-recompute_attention": (4, UNSHARDED, "gqa", {"memory": MemoryConfig(("attention",))}),
    "pp2-tp2-gqa-mtp": (4, replace(TP2, pp=2), "gqa-mtp", {}),
    "zbv-mla": (2, ParallelConfig(pp=2, vpp=2, pp_schedule="zbv"), "mla-deep", {}),
    "cp2-tp2-gqa": (4, replace(CP2, tp=2), "gqa", {}),
    "cp2-mla": (2, CP2, "mla", {}),
    "cp2-allgather-gqa-window": (2, replace(CP2, cp_kind="allgather"), "gqa-window", {}),
    "cp2-allgather-mla": (2, replace(CP2, cp_kind="allgather"), "mla", {}),
    "cp2-ring-gqa": (2, replace(CP2, cp_kind="ring"), "gqa", {}),
}


@pytest.mark.few("dp2-gqa", "tp2-mla-recompute_parts")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_clip_as_one_process(ranks: Any, alone: Callable[..., Any], layout: str) -> None:
    num_ranks, parallel, name, changes = LAYOUTS[layout]
    run = recipe(parallel, name, **changes)
    expected = alone(name, run.data.document_attention)
    assert min(expected["clipped_heads"]) > 0
    assert_same(ranks(num_ranks, train, run), expected)


@pytest.mark.few("gqa-window")
@pytest.mark.parametrize("name", ["gqa-window", "mla"])
def test_compiled_attention_clips_alike(ranks: Any, alone: Callable[..., Any], name: str) -> None:
    compiled = ranks(1, train_compiled, recipe(ALONE, name, compile=CompileConfig("on")))
    assert_same(compiled, alone(name, True))


def assert_same(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Compare the numbers of every rank, and the weights of its stages."""
    for result in results:
        assert result["clipped_heads"] == expected["clipped_heads"]
        for name in ("loss", "max_attention_logit"):
            assert result[name] == pytest.approx(expected[name], rel=1e-6 if name != "loss" else 1e-9), name
        assert result["weights"]
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], rtol=1e-9, atol=1e-9)
