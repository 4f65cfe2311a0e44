"""Which weight gradients of a stage are delayed, and that all are those of a whole backward.

tests/distributed/test_pipelines.py compares whole runs with one process; here the same schedule runs with and without
delayed gradients, bit for bit, also in bf16.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import load
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.compile import regional
from titan_moe.config import Recipe
from titan_moe.config.gemms import gemm_modules
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.train import RunConfig
from titan_moe.kernels.delayed_weight_grads import PendingWeightGrads, WeightGradQueue
from titan_moe.layers.moe import MoE
from titan_moe.models.transformer import Transformer
from titan_moe.parallel import tensor
from titan_moe.parallel.autograd_segment import AutogradSegment
from titan_moe.parallel.mesh import build_meshes
from titan_moe.parallel.pipeline import weight_grads
from titan_moe.plan.pipeline.weight_grads import obstacle_of
from titan_moe.plan.resolved import Resolved
from titan_moe.precision import policy
from titan_moe.training import build

one_loss = load("distributed/test_one_loss")
CPU = torch.device("cpu")
ZBV = ParallelConfig(pp=2, vpp=2, pp_schedule="zbv", accumulate_unsharded=True)
TOKENS = torch.arange(16).reshape(2, 8)
LATE = {
    "gqa": ("qkv.weight", "out.weight", "gate_up", "down", "gate_up.weight", "down.weight"),
    "mla-latent-gate": (
        "q_up.weight",
        "kv_down.weight",
        "kv_up.weight",
        "out.weight",
        "gate_up",
        "down",
        "gate_up.weight",
        "down.weight",
        "gate.weight",
        "latent_down.weight",
        "latent_up.weight",
    ),
}
"""Ends of the names of parameters with delayed gradients, by model."""


def recipe_of(name: str, parallel: ParallelConfig = ZBV, **changes: Any) -> Recipe:
    base = one_loss.split_recipe(parallel, name, **changes)
    moe = replace(base.model.moe, expert_mlp_bias=True)
    train = replace(base.train, micro_batch_sequences=1)
    return replace(base, model=replace(base.model, num_layers=4, moe=moe), train=train)


def built(recipe: Recipe) -> tuple[nn.Module, WeightGradQueue]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(recipe.model, kernels=recipe.perf.chosen_kernels)
    finally:
        torch.set_default_dtype(torch.float32)
    queue = WeightGradQueue()
    weight_grads.apply(model, queue, recipe.compile, CPU)
    return model, queue


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class Watch(TorchDispatchMode):
    """Counts operations, and sees the memory of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.memory = Counter[str](), dict[StorageWeakRef, str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, Tensor):
                self.memory[StorageWeakRef(result.untyped_storage())] = str(func)
        return results

    def alive(self) -> set[StorageWeakRef]:
        return {memory for memory in self.memory if not memory.expired()}


def of(tensors: Iterable[Tensor]) -> set[StorageWeakRef]:
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}


def late_names(names: Iterable[str], model: str) -> set[str]:
    return {name for name in names if name.endswith(LATE[model])}


def is_of_experts(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("name", LATE)
def test_backward_weight_computes_each_delayed_gradient_once(name: str) -> None:
    model, queue = built(recipe_of(name))
    model(TOKENS, TOKENS).backward()  # not recorded
    whole = grads_of(model)
    model.zero_grad()
    late = late_names(whole, name)
    num_of_experts = sum(map(is_of_experts, late))
    assert 0 < num_of_experts < len(late) < len(whole)

    segment = AutogradSegment(lambda tokens_BN: (model(tokens_BN, TOKENS),))
    with queue.delaying() as pending:
        segment(TOKENS)
    with Watch() as first:
        segment.backward([torch.ones((), dtype=torch.float64)])
    assert whole.keys() - grads_of(model).keys() == late and not first.counts["grouped_mm_dw"]
    with Watch() as second:
        pending.compute()
    assert second.counts["grouped_mm_dw"] == num_of_experts
    assert second.counts["mm"] == len(late) - num_of_experts
    for parameter, grad in grads_of(model).items():
        assert torch.equal(grad, whole[parameter]), parameter


@pytest.mark.parametrize("name", LATE)
def test_only_operands_are_kept_between_the_two(name: str) -> None:
    model, queue = built(recipe_of(name))
    segment = AutogradSegment(lambda tokens_BN: (model(tokens_BN, TOKENS),))
    with Watch() as watch, queue.delaying() as pending:
        segment(TOKENS)
        kept = watch.alive()
        segment.backward([torch.ones((), dtype=torch.float64)])
    del segment
    operands = of(
        cell.cell_contents
        for _, grads in pending.uses
        for cell in grads.pending.__closure__
        if isinstance(cell.cell_contents, Tensor)
    )
    others = of([*model.parameters(), *model.buffers(), TOKENS, *(root for root, _ in pending.uses)])
    others |= of(grads_of(model).values())
    rest = watch.alive() - operands - others
    assert not rest, [watch.memory[memory] for memory in rest]
    assert 0 < len(operands) < len(kept - others)
    pending.compute()
    assert not watch.alive() & operands


def compiled(recipe: Recipe) -> tuple[nn.Module, WeightGradQueue]:
    model, queue = built(replace(recipe, compile=CompileConfig("on")))
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        regional.apply(model, CompileConfig("on"), CPU)
    return model, queue


@pytest.mark.slow
def test_what_is_in_a_graph_computes_its_own_gradients() -> None:
    torch._dynamo.reset()
    recipe = recipe_of("mla-latent-gate")
    (model, queue), (eager, _) = compiled(recipe), built(recipe)
    with queue.delaying() as pending:
        loss = model(TOKENS, TOKENS)
    loss.backward()
    missing = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert missing == {name for name, _ in model.named_parameters() if "latent_" in name}
    pending.compute()
    eager(TOKENS, TOKENS).backward()
    for name, grad in grads_of(eager).items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernels", ["fused", "grouped_mm"])
def test_experts_in_triton_stay_out_of_graphs(kernels: str) -> None:
    recipe = recipe_of("gqa", perf=PerfConfig(kernels=kernels))
    recipe = replace(recipe, model=replace(recipe.model, moe=replace(recipe.model.moe, expert_mlp_bias=False)))
    model, _ = compiled(recipe)
    for experts in (moe.experts for moe in model.modules() if isinstance(moe, MoE)):
        is_queued = getattr(experts.mlp, "queue", None) is not None
        assert is_queued == (kernels == "fused") == ("compute" not in vars(experts))


def parts_that_delay(model: nn.Module) -> list[Any]:
    """By module, what `apply` replaces of it."""
    return [(vars(it).get("forward"), vars(it).get("swiglu_down"), vars(it).get("mlp")) for it in model.modules()]


def names_that_delay(recipe: Recipe) -> set[str]:
    """The modules with GEMMs that delay in a run, which need not be compiled for it."""
    with torch.device("meta"):
        model = Transformer(recipe.model, kernels=recipe.perf.chosen_kernels)
    policy.convert(model, Resolved(recipe, 1), CPU)
    if recipe.parallel.tp > 1:
        meshes = build_meshes(resolve(recipe.parallel, dist.get_world_size()), CPU)
        tensor.apply(model, recipe.parallel, meshes)
    before, names = parts_that_delay(model), dict(model.named_modules())
    weight_grads.apply(model, WeightGradQueue(), recipe.compile, CPU)
    changed = [old != new for old, new in zip(before, parts_that_delay(model), strict=True)]
    delaying = {name for name, is_changed in zip(names, changed, strict=True) if is_changed}
    return {name.removesuffix(".gate") for name in delaying if not name.endswith("shared_experts.gate")}


def planned_names(recipe: Recipe) -> set[str]:
    return {module.name for module in gemm_modules(recipe.model) if obstacle_of(recipe, module) is None}


EMULATED = PrecisionConfig("bf16", "fp32", "fp32", format="mxfp8", backend="emulated", modules_in_compute=("*.1.*",))
SYMM_MEM = replace(ZBV, ep=2, dispatcher="symm_mem")
FUSED = PerfConfig(kernels="fused")


@pytest.mark.parametrize(
    ("name", "changes", "kinds"),
    [
        pytest.param("mla-latent-gate", {}, {"attention", "dense", "experts", "latent", "shared"}, id="all"),
        pytest.param("mla-latent-gate", {"compile": CompileConfig("on")}, {"latent"}, id="compiled"),
        pytest.param("gqa", {"compile": CompileConfig("on"), "perf": FUSED}, {"experts"}, id="compiled_beside_triton"),
        pytest.param(
            "gqa", {"parallel": SYMM_MEM, "perf": FUSED}, {"attention", "dense", "experts", "shared"}, id="arena"
        ),
        pytest.param(
            "gqa",
            {"parallel": replace(SYMM_MEM, expert_rank_capacity_factor=0.0), "perf": FUSED},
            {"attention", "dense", "experts", "shared"},
            id="no_arena",
        ),
        pytest.param(
            "gqa",
            {"parallel": replace(SYMM_MEM, expert_rank_capacity_factor=0.0, overlap="tile"), "perf": FUSED},
            {"attention", "dense", "experts", "shared"},
            id="tile",
        ),
        pytest.param("gqa", {"parallel": SYMM_MEM}, {"attention", "dense", "experts", "shared"}, id="grouped"),
        pytest.param(
            "gqa",
            {"parallel": replace(SYMM_MEM, overlap="tile"), "perf": FUSED, "compile": CompileConfig("on")},
            {"experts"},
            id="tile_compiled",
        ),
        pytest.param("gqa", {"precision": EMULATED}, {"attention", "experts", "shared"}, id="emulated"),
    ],
)
def test_the_plan_knows_what_is_delayed(name: str, changes: dict[str, Any], kinds: set[str]) -> None:
    base = recipe_of(name, perf=PerfConfig(kernels="grouped_mm"), run=RunConfig(device="cpu"))
    recipe = replace(base, **changes)
    moe = replace(recipe.model.moe, expert_mlp_bias=False, ffn_hidden_size=32, shared_ffn_hidden_size=32)
    recipe = replace(recipe, model=replace(recipe.model, hidden_size=32, ffn_hidden_size=32, moe=moe))
    planned = planned_names(recipe)
    assert planned == names_that_delay(recipe)
    found = {"attention": ".attention.", "experts": ".experts", "latent": ".latent_", "shared": ".shared_experts."}
    words = {kind: [name for name in planned if word in name] for kind, word in found.items()}
    dense = {f"layers.0.feed_forward.{end}" for end in ("gate_up", "down")} & planned
    assert {kind for kind, names in (words | {"dense": dense}).items() if names} == kinds


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_the_plan_knows_which_layers_overlap_messages_over_tp(ranks: Any, name: str) -> None:
    recipe = recipe_of(name, ParallelConfig(tp=2, tp_comm_overlap=True), run=RunConfig(device="cpu"))
    planned = planned_names(recipe)
    latents = {"q_down", "kv_down", "kv_up"} if name == "mla" else set()
    assert {name.rpartition(".")[2] for name in planned} == {"experts", *latents}
    for found in ranks(2, names_that_delay, recipe):
        assert found == planned


def gradients(recipe: Recipe, *, delays: bool) -> tuple[dict[str, Tensor], int]:
    """This rank's gradients of a step, and how many weight gradients were delayed."""
    num_delayed, compute = 0, PendingWeightGrads.compute

    def counted(pending: PendingWeightGrads) -> None:
        nonlocal num_delayed
        num_delayed += len(pending.uses)
        compute(pending)

    with mock.patch.object(weight_grads, "apply", weight_grads.apply if delays else lambda *_: None):
        meshes, _, parts, _, _, runner = build.assemble(recipe, CPU)
    with mock.patch.object(PendingWeightGrads, "compute", counted):
        batch = one_loss.batch_of(0, 1, meshes, has_documents=True, parallel=recipe.parallel)
        grads = [one_loss.first_gradients(runner.step, parts, batch) for _ in range(2)]
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items()), "a step leaves nothing behind"
    return grads[0], num_delayed


def both(recipe: Recipe) -> list[tuple[dict[str, Tensor], int]]:
    return [gradients(recipe, delays=delays) for delays in (True, False)]


BF16 = PrecisionConfig("bf16", "fp32", "fp32")
EP2 = replace(ZBV, ep=2, dispatcher="alltoall")


@pytest.mark.few("unsharded_experts", "tp2-ep2-shared_heads", "tied", "whole_backwards_too")
@pytest.mark.parametrize(
    ("num_ranks", "parallel", "name", "precision"),
    [
        pytest.param(2, ZBV, "gqa", BF16, id="unsharded_experts"),
        pytest.param(4, ZBV, "mla-latent-gate", BF16, id="edp2"),
        pytest.param(4, replace(EP2, tp=2), "gqa", BF16, id="tp2-ep2"),
        pytest.param(4, replace(EP2, tp=2), "gqa-shared", one_loss.FP64, id="tp2-ep2-shared_heads"),
        pytest.param(2, ZBV, "gqa-tied", BF16, id="tied"),
        pytest.param(2, replace(ZBV, pp_schedule="dualpipev"), "gqa", one_loss.FP64, id="whole_backwards_too"),
    ],
)
def test_a_step_has_the_gradients_of_whole_backwards(
    ranks: Any, num_ranks: int, parallel: ParallelConfig, name: str, precision: PrecisionConfig
) -> None:
    kernels = "reference" if precision == one_loss.FP64 else "grouped_mm"
    recipe = recipe_of(name, parallel, precision=precision, perf=PerfConfig(kernels=kernels))
    tolerance = 1e-12 if parallel.pp_schedule == "dualpipev" else 0  # which adds microbatches in another order
    for (delayed, num_delayed), (whole, num_of_whole) in ranks(num_ranks, both, recipe):
        assert num_delayed > 0 == num_of_whole and delayed.keys() == whole.keys()
        for parameter, grad in whole.items():
            torch.testing.assert_close(
                delayed[parameter], grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=parameter: f"{n}: {m}"
            )
