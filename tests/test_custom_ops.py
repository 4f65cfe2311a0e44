"""Every `torch.library` operation of the package keeps what it tells autograd and the compiler.

What exists is asked of PyTorch, and arguments are those of real calls: the samples of registered operations, and a
layer behind each dispatcher, forward and backward, in a group of one rank. An operation that none of these runs reaches
fails.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import walk_packages
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.kernel_samples import SAMPLES, as_tuple
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import titan_moe
from titan_moe.adapters import frozen, low_rank, stored
from titan_moe.config.adapter import AdapterConfig, BaseFormat
from titan_moe.config.context import ring_backend
from titan_moe.config.kernels import PRESETS
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    CloningDispatcher,
    HierarchicalDispatcher,
    LocalDispatcher,
)
from titan_moe.dispatch.base import TokenDispatcher
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clones import dispatcher as cloning
from titan_moe.dispatch.clones import weights as clone_weights
from titan_moe.dispatch.clones.weights import CollectiveCloneWeights, SymmMemCloneWeights
from titan_moe.dispatch.hierarchical import NodeGroups
from titan_moe.dispatch.symm_mem import dispatcher as symm_mem
from titan_moe.dispatch.symm_mem import mlp as symm_mem_mlp
from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher
from titan_moe.dispatch.symm_mem.fused import SymmMemFusedDispatcher
from titan_moe.dispatch.symm_mem.memory import SymmMemory
from titan_moe.kernels.attention.max_logits import ALL_CAUSAL
from titan_moe.kernels.choose import PERMUTE
from titan_moe.kernels.delayed_weight_grads import WeightGradQueue
from titan_moe.kernels.experts.arena import Arena
from titan_moe.kernels.experts.composite_mlp import CompositeMLP, ExpertMLP
from titan_moe.kernels.experts.fp8.format import FP8_BLOCKWISE, FP8_ROWWISE
from titan_moe.kernels.experts.fused_mlp import FusedMLP, Keep, fused_expert_mlp
from titan_moe.kernels.experts.grouped_mm import GROUPED_GEMM
from titan_moe.kernels.optim.accumulate import accumulate_reference
from titan_moe.kernels.registry import Kernel, Sample, load_all
from titan_moe.layers.attention import Context
from titan_moe.layers.experts import GroupedExperts
from titan_moe.layers.init import init_weights
from titan_moe.layers.moe import MoE
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.ring_attention import RingAttention, RingMaxLogits
from titan_moe.parallel.sequence import SumOverRanks
from titan_moe.parallel.tensor_overlap import gather_then_multiply, multiply_then_scatter
from titan_moe.parallel.unsharded_experts import UnshardedWeights
from titan_moe.parallel.vocabulary import fused_cross_entropy_over_ranks
from titan_moe.plan.cost.loads import LayerLoads

UTILS = ("test_schema", "test_autograd_registration", "test_faketensor")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NUM_EXPERTS, WIDTH = 4, 16
MODEL = ModelConfig(hidden_size=WIDTH, moe=MoEConfig(num_experts=NUM_EXPERTS, top_k=2, ffn_hidden_size=8))
MEMORY_BYTES = 1 << 16


def all_operations() -> list[str]:
    """Names of all operations, once everything is imported that could define one."""
    for module in walk_packages([str(Path(titan_moe.__file__).parent)], "titan_moe."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("titan_moe::"))


def cases() -> list[Any]:
    """Every operation on every device that has it: on CPU in Triton's interpreter, and on GPUs."""
    found = []
    for name in all_operations():
        for device, mark in (("cpu", pytest.mark.interpreted), ("cuda", pytest.mark.gpu)):
            keys = (device.upper(), "CompositeExplicitAutograd")
            if any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys):
                found.append(pytest.param(name, device, id=f"{name.removeprefix('titan_moe::')}-{device}", marks=mark))
    return found


class Calls(TorchDispatchMode):
    """Keeps the arguments of the calls that differ in more than sizes and values."""

    def __init__(self) -> None:
        super().__init__()
        self.of: defaultdict[str, dict[str, tuple[OpOverload, tuple[Any, ...]]]] = defaultdict(dict)
        self.capacities: list[ExpertCapacity] = []  # live as long as the calls

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op.namespace == "titan_moe":
            assert not kwargs
            # as they are after the call: what it leaves in shared memory it leaves there again
            kept = tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), args)
            self.of[op.name().removesuffix(".default")].setdefault(str([kind_of(arg) for arg in args]), (op, kept))
        return out


def kind_of(arg: Any) -> Any:
    if isinstance(arg, (list, tuple)):
        return [kind_of(item) for item in arg]
    if isinstance(arg, Tensor):
        return arg.dtype, arg.ndim, arg.requires_grad
    return arg if arg is None or isinstance(arg, bool) else type(arg)


def run_registry(device: torch.device) -> None:
    """Forward and backward of every sample, and forward alone; Triton's in fp32 in the interpreter, in bf16 on GPUs."""
    for kernel in load_all().values():
        only = torch.float32 if device.type == "cpu" else torch.bfloat16
        samples = SAMPLES[kernel.name]
        for dtype in (only,) if kernel.needs_triton and only in samples.dtypes else samples.dtypes:
            for sample in samples.draw(device, dtype):
                run(kernel, sample)


def run(kernel: Kernel, sample: Sample) -> None:
    args = list(sample.args)
    for index in range(sample.num_differentiable):
        args[index] = args[index].detach().requires_grad_()
    outs = [out for out in as_tuple(kernel.op(*args)) if out.requires_grad]
    torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    if outs:
        with torch.no_grad():
            kernel.op(*sample.args)


def run_layers(device: torch.device, dtype: torch.dtype) -> list[ExpertCapacity]:
    """A layer with Triton's kernels behind each dispatcher, without clones and with them, trained and frozen, and one
    in fp8; returns what owns the arenas, one a run: operations know them by number, and find there what forward has
    left."""
    group, capacities = dist.group.WORLD, []
    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=device)
    shared = SymmMemory(memory, torch.tensor([memory.data_ptr()], device=device), 0)

    def in_an_arena(*args: Any, **options: Any) -> TokenDispatcher:
        capacities.append(with_arena(device, dtype))
        return SymmMemFusedDispatcher(*args, memory=shared, capacity=capacities[-1], **options)

    kinds: list[tuple[Callable[..., TokenDispatcher], Any]] = [
        (partial(AllGatherDispatcher, group=group), CollectiveCloneWeights(group)),
        (partial(AllToAllDispatcher, group=group), CollectiveCloneWeights(group)),
        (partial(HierarchicalDispatcher, groups=NodeGroups(group, group)), CollectiveCloneWeights(group)),
        (
            partial(HierarchicalDispatcher, groups=NodeGroups(group, group), memory=shared),
            CollectiveCloneWeights(group),
        ),
        (partial(SymmMemDispatcher, memory=shared), SymmMemCloneWeights(shared)),
        (partial(SymmMemFusedDispatcher, memory=shared), SymmMemCloneWeights(shared)),
        (in_an_arena, SymmMemCloneWeights(shared)),
    ]
    for (kind, gather_weights), num_replicas, is_trained in product(kinds, (0, 1), (True, False)):
        layer = MoE(MODEL, kernels=PRESETS["fused"]).to(device, dtype)
        layer.dispatcher = kind(NUM_EXPERTS + num_replicas, permute=PERMUTE["triton"])
        if num_replicas:
            over = shared if isinstance(gather_weights, SymmMemCloneWeights) else None
            layer.dispatcher = CloningDispatcher(layer.dispatcher, NUM_EXPERTS, num_replicas, group, over)
            layer.experts.transforms["clones"] = gather_weights
        run_layer(layer, is_trained)
    biased = replace(MODEL, moe=replace(MODEL.moe, expert_mlp_bias=True))
    for kind in (LocalDispatcher, partial(SymmMemFusedDispatcher, memory=shared)):
        layer = MoE(biased, kernels=PRESETS["fused"]).to(device, dtype)
        layer.dispatcher = kind(NUM_EXPERTS, permute=PERMUTE["triton"])
        run_layer(layer, is_trained=True)
    for kind, model in product((partial(SymmMemFusedDispatcher, memory=shared), in_an_arena), (MODEL, biased)):
        layer, queue = MoE(model, kernels=PRESETS["fused"]).to(device, dtype), WeightGradQueue()
        layer.dispatcher = kind(NUM_EXPERTS, permute=PERMUTE["triton"])
        layer.experts.mlp = replace(layer.experts.mlp, queue=queue)
        with queue.delaying() as pending:
            run_layer(layer, is_trained=True)
        pending.compute()
    for kind in (LocalDispatcher, partial(SymmMemFusedDispatcher, memory=shared), in_an_arena):
        for keep in (Keep.ROWS, Keep.NOTHING):
            layer = MoE(MODEL, kernels=PRESETS["fused"]).to(device, dtype)
            layer.dispatcher = kind(NUM_EXPERTS, permute=PERMUTE["triton"])
            layer.experts.mlp = replace(layer.experts.mlp, keeps=keep)
            run_layer(layer, is_trained=True)
    for format, width in ((FP8_ROWWISE, WIDTH), (FP8_BLOCKWISE, 128)):
        of_width = replace(MODEL, hidden_size=width, moe=replace(MODEL.moe, ffn_hidden_size=width))
        layer = MoE(of_width, kernels=PRESETS["fused"]).to(device, dtype)
        for mlp in (CompositeMLP(GROUPED_GEMM[format.name]), FusedMLP(format)):
            layer.experts.mlp = mlp
            run_layer(layer, is_trained=True, width=width)  # weights are quantised for each use
        layer.experts.transforms["local"] = UnshardedWeights(None, format, keeps=True, accumulate=accumulate_reference)
        run_layer(layer, is_trained=True, width=width)
    for mlp, base in product((fused_expert_mlp, CompositeMLP(GROUPED_GEMM["grouped_mm"])), ("compute", "fp8_rowwise")):
        run_frozen(mlp, base, device, dtype)
    shares_BE = torch.rand(2, 4, device=device, requires_grad=True)
    sums = SumOverRanks(group)(shares_BE, torch.ones_like(shares_BE), shares_BE.new_ones(()))  # as with tp
    sums[0].sum().backward()
    head_args = [torch.randn(size, 8, device=device, dtype=dtype, requires_grad=True) for size in (6, 16)]
    head_args.append(torch.randint(16, (6,), device=device))
    fused_cross_entropy_over_ranks(*head_args, 4, group.group_name).backward()
    with torch.no_grad():
        fused_cross_entropy_over_ranks(*head_args, 4, group.group_name)
    up, down = (torch.nn.Linear(8, 8, bias=False).to(device, dtype) for _ in range(2))
    gather_then_multiply(up, group, is_sequence=True)
    multiply_then_scatter(down, group, is_sequence=True)
    down(up(torch.randn(2, 4, 8, device=device, dtype=dtype, requires_grad=True))).sum().backward()
    q, k, v = (torch.randn(2, 4, heads, 8, device=device, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    backend = ring_backend("auto", device.type, head_dim=8, is_deterministic=False)
    RingAttention(group, backend)(q, k, v, Context(q, q, None), 1.0).sum().backward()
    RingMaxLogits(group, "torch")(q, k, 1.0, ALL_CAUSAL)
    return capacities


def run_layer(layer: MoE, is_trained: bool, width: int = WIDTH) -> None:
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    layer.experts.requires_grad_(is_trained)
    like = next(layer.parameters())
    layer(torch.randn(2, 4, width, device=like.device, dtype=like.dtype, requires_grad=True)).sum().backward()


def run_frozen(mlp: ExpertMLP, base: BaseFormat, device: torch.device, dtype: torch.dtype) -> None:
    """A model with adapters beside frozen weights, whose experts have this MLP."""
    adapter = AdapterConfig(rank=8, targets=("attention", "dense", "experts"), base=base)
    shape: Any = {"num_layers": 2, "num_dense_layers": 1, "vocab_size": 16, "ffn_hidden_size": 16}
    attention = AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=8)
    with torch.device("meta"):
        model = Transformer(replace(MODEL, attention=attention, adapter=adapter, **shape))
    for experts in (module for module in model.modules() if isinstance(module, GroupedExperts)):
        experts.mlp = mlp
    stored.apply(model, adapter, ())
    low_rank.apply(model, adapter)
    frozen.freeze(model, (), dtype, has_adapters=True)
    model.to_empty(device=device)
    init_weights(model, 0, 0.1, 2)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype) if parameter.requires_grad else parameter.data
    tokens = torch.randint(16, (2, 4), device=device)
    model(tokens, tokens).sum().backward()


def with_arena(device: torch.device, dtype: torch.dtype) -> ExpertCapacity:
    """The capacity of a layer whose rows lie in an arena."""
    capacity = ExpertCapacity(1.0, device)
    arena = Arena(WIDTH, MODEL.moe.ffn_hidden_size, dtype, device, num_delayed_slabs=1)
    capacity.use_arena(arena, LayerLoads(1, 8, 8 * MODEL.moe.top_k, 8, 8 * MODEL.moe.top_k))
    return capacity


def its_own_peer(lay_out: Callable[..., Any]) -> Callable[..., Any]:
    """Arrays of a rank alone: where the memory is copied, the copy is the peer."""

    def laid_out(memory: Tensor, peer_ptrs_P: Tensor, *args: Any) -> Any:
        return lay_out(memory, torch.full_like(peer_ptrs_P, memory.data_ptr()), *args)

    return laid_out


@pytest.fixture(scope="module")
def calls() -> Iterator[Callable[[str], Calls]]:
    """By device: the calls of all runs, whose group and whose one rank's memory stay as long as they do."""
    made: dict[str, Calls] = {}

    def make(device: str) -> Calls:
        if device not in made:
            torch.manual_seed(0)
            dtype = torch.float32 if device == "cpu" else torch.bfloat16
            made[device] = Calls()
            with made[device]:
                run_registry(torch.device(device))
                made[device].capacities = run_layers(torch.device(device), dtype)
        return made[device]

    has_gpus = torch.cuda.is_available()
    with ExitStack() as patches:
        for module, name in (
            (symm_mem, "symm_arrays"),
            (symm_mem_mlp, "symm_arrays"),
            (clone_weights, "clone_arrays"),
            (cloning, "count_arrays"),
        ):
            patches.enter_context(mock.patch.object(module, name, its_own_peer(getattr(module, name))))
        backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        with torch.cuda.device(0) if has_gpus else nullcontext():
            yield make
        dist.destroy_process_group()


@pytest.mark.parametrize(("name", "device"), cases())
def test_operation_is_sound(calls: Callable[[str], Calls], name: str, device: str) -> None:
    """It changes what it says it changes, its fake tells the shapes, and autograd knows of it."""
    reached = calls(device).of[name]
    assert reached, f"no run of this file calls {name}: give its kernel a registry entry, or its dispatcher a run here"
    for op, args in reached.values():
        # test_schema compares what it is given by torch.allclose, which lacks fp8
        has_fp8 = any(isinstance(leaf, Tensor) and leaf.dtype in FP8 for leaf in tree_leaves(args))
        torch.library.opcheck(op, args, test_utils=[name for name in UTILS if not (has_fp8 and name == "test_schema")])
