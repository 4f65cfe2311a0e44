"""The dispatcher over shared memory gives what one process gives.

On CPU ranks are processes that map each other's files, and their kernels, the barrier too, run in Triton's interpreter:
the same code reads and writes the same memory at its own time. On GPUs of one node the memory is CUDA's.
"""

import copy
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from titan_moe.dispatch import capacity as capacity_module
from titan_moe.dispatch import symm_mem
from titan_moe.dispatch.base import TokenDispatcher
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.clone_weights import SymmMemCloneWeights
from titan_moe.dispatch.cloning import CloningDispatcher
from titan_moe.dispatch.symm_mem import SymmMemDispatcher, SymmMemory, open_symm_memory
from titan_moe.kernels.symm_mem.arrays import signal_bytes, symm_bytes
from titan_moe.kernels.symm_mem.clones import clone_bytes
from titan_moe.layers.experts import GroupedExperts


def neighbour(name: str) -> Any:
    """A module of this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


equal_local, mapped_files = neighbour("test_equal_local"), neighbour("mapped_files")
NUM_GPUS = torch.cuda.device_count()
MOST_SPARE = 2
SIZES = (equal_local.NUM_TOKENS, equal_local.WIDTH, equal_local.TOP_K, torch.float64, torch.float64)


def share(folder: str | None) -> tuple[SymmMemory, torch.device]:
    """This rank's part of the group's memory: files of a folder, or GPUs."""
    num_ranks, elements = dist.get_world_size(), 3 * equal_local.HIDDEN * equal_local.WIDTH
    places = (num_ranks, equal_local.NUM_EXPERTS // num_ranks, MOST_SPARE, elements, torch.float64)
    num_bytes = max(symm_bytes(num_ranks, *SIZES), clone_bytes(*places))
    if folder is not None:
        return mapped_files.map_files(folder, num_bytes, dist.group.WORLD), torch.device("cpu")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return open_symm_memory(num_bytes, dist.group.WORLD, device), device


def my_experts(device: torch.device) -> GroupedExperts:
    per_rank = equal_local.NUM_EXPERTS // dist.get_world_size()
    return equal_local.experts(dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank).to(device)


def my_inputs(routing: str, device: torch.device) -> list[Tensor]:
    num_ranks = dist.get_world_size()
    drawn = equal_local.inputs(routing, num_ranks, [equal_local.NUM_TOKENS] * num_ranks)
    return [tensor.to(device) for tensor in drawn[dist.get_rank()]]


def poison(memory: SymmMemory) -> None:
    """Fill all but the signals with NaN and -1, when nobody reads any more and before anybody writes."""
    for work in (lambda: None, lambda: memory.local[signal_bytes(memory.peer_ptrs_P.numel()) :].fill_(255)):
        work()
        if memory.local.is_cuda:
            torch.cuda.synchronize()
        dist.barrier()


def lending(memory: SymmMemory, module: GroupedExperts, num_replicas: int) -> TokenDispatcher:
    """A dispatcher that fills spare slots of a rank, if there are any, with clones of the experts of `module`."""
    num_experts = equal_local.NUM_EXPERTS + dist.get_world_size() * num_replicas
    inner = SymmMemDispatcher(num_experts, memory)
    if not num_replicas:
        return inner
    group = dist.new_group(backend="nccl") if memory.local.is_cuda else dist.group.WORLD
    module.gather_weights = SymmMemCloneWeights(memory)
    return CloningDispatcher(inner, equal_local.NUM_EXPERTS, num_replicas, group)


def run_routings(folder: str | None, routings: tuple[str, ...], num_replicas: int = 0) -> list[list[Tensor]]:
    """Results of each routing, one after the other in the same memory."""
    memory, device = share(folder)
    module, results = my_experts(device), []
    dispatcher = lending(memory, module, num_replicas)
    for routing in routings:
        module.zero_grad()
        poison(memory)
        results.append([tensor.cpu() for tensor in equal_local.serve(dispatcher, module, my_inputs(routing, device))])
    return results


def check_routings(answers: list[list[list[Tensor]]], routings: tuple[str, ...]) -> None:
    num_ranks = len(answers)
    for index, routing in enumerate(routings):
        drawn = equal_local.inputs(routing, num_ranks, [equal_local.NUM_TOKENS] * num_ranks)
        expected = equal_local.join([equal_local.dense_oracle(inputs) for inputs in drawn], experts_add_up=True)
        actual = equal_local.join([answer[index] for answer in answers], experts_add_up=False)
        equal_local.assert_close(actual, expected)


def stepped(dispatcher: TokenDispatcher, module: GroupedExperts) -> Callable[..., Tensor]:
    """Two layers, so that the memory is used again before either has its backward."""

    def step(x_TD: Tensor, ids_TK: Tensor, scores_TK: Tensor) -> Tensor:
        for _ in range(2):
            routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
            x_TD = x_TD + dispatcher.combine(module(routed), routed)
        return x_TD

    return step


def compile_two_layers(folder: str | None, num_replicas: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of two layers, eager and as one graph."""
    memory, device = share(folder)
    module = my_experts(device)
    step = stepped(lending(memory, module, num_replicas), module)
    return run_and_compile(step, module, lambda: my_inputs("skewed", device), device)


def run_and_compile(
    step: Callable[..., Tensor], module: GroupedExperts, draw: Callable[[], list[Tensor]], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients of a step, eager and as one graph."""
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager" if device.type == "cpu" else "inductor")
    results = []
    for run in (step, compiled):
        x_TD, ids_TK, scores_TK, grad_TD = draw()
        x_TD, scores_TK = x_TD.requires_grad_(), scores_TK.requires_grad_()
        module.zero_grad()
        y_TD = run(x_TD, ids_TK, scores_TK)
        y_TD.backward(grad_TD)
        grads = (x_TD.grad, scores_TK.grad, module.gate_up.grad, module.down.grad)
        results.append([tensor.detach().cpu() for tensor in (y_TD, *grads)])
    return results[0], results[1]


def find_orders(folder: str) -> tuple[bool, bool]:
    """Of a layer with clones as one graph: whether weights of clones are asked for after the rows have come, and rows'
    gradients leave after those of clones, by what each needs of the other."""
    graphs: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    memory, device = share(folder)
    module = my_experts(device)
    dispatcher = lending(memory, module, 1)
    x_TD, ids_TK, scores_TK, _ = my_inputs("skewed", device)

    def layer(x_TD: Tensor) -> Tensor:
        routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        return dispatcher.combine(module(routed), routed)

    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(x_TD.requires_grad_()).sum().backward()
    forward, backward = graphs
    return (
        needs(forward, "symm_get_clones", "symm_get"),
        needs(backward, "symm_put_gradients", "symm_add_clones"),
    )


def needs(graph: torch.fx.Graph, later: str, earlier: str) -> bool:
    """Whether one operation waits for what another makes."""
    (asked,), (wanted,) = ([node for node in graph.nodes if name in operations(node)] for name in (later, earlier))
    before, found = [asked], set()
    while before:
        node = before.pop()
        found.add(node)
        before += [other for other in node.all_input_nodes if other not in found]
    return wanted in found


def operations(node: torch.fx.Node) -> list[str]:
    """Names of the operation that a node calls, itself or through one that knows what it changes."""
    called = [node.target, *node.args]
    return [op._opname for op in called if isinstance(op, torch._ops.OpOverload)]


def stress(folder: str | None, num_dispatches: int) -> int:
    """How many tokens did not get back the sum of their own copies, over many routings."""
    memory, device = share(folder)
    dispatcher = SymmMemDispatcher(equal_local.NUM_EXPERTS, memory, capacity=ExpertCapacity(2.0, device))
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x_TD = torch.randn(equal_local.NUM_TOKENS, equal_local.WIDTH, generator=generator, device=device)
    per_rank = equal_local.NUM_EXPERTS // dist.get_world_size()
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(num_dispatches):
        scores_TE = torch.rand(len(x_TD), equal_local.NUM_EXPERTS, generator=generator, device=device)
        scores_TK, ids_TK = scores_TE.topk(equal_local.TOP_K)
        routed = dispatcher.dispatch(x_TD, ids_TK, scores_TK)
        y_TD = dispatcher.combine(routed.x_SD, routed)
        ranks_TK = ids_TK // per_rank
        copies_T1 = torch.stack([(ranks_TK == p).any(1) for p in range(dist.get_world_size())]).sum(0)[:, None]
        wrong += ((y_TD - x_TD * copies_T1).abs() > 1e-5).any(1).sum()
    return int(wrong)


def interleave(folder: str | None) -> list[Tensor]:
    """Two chunks at once, so that every kind of exchange follows its own kind; what came wrong of y, dx and dscores."""
    memory, device = share(folder)
    dispatcher = SymmMemDispatcher(equal_local.NUM_EXPERTS, memory)
    chunks = [my_inputs(routing, device) for routing in ("random", "skewed")]
    for x_TD, _, scores_TK, _ in chunks:
        x_TD.requires_grad_(), scores_TK.requires_grad_()
    exchanges = [dispatcher.prepare(ids_TK, scores_TK) for _, ids_TK, scores_TK, _ in chunks]
    arrived = [
        dispatcher.finish_dispatch(dispatcher.start_dispatch(chunk[0], exchange), exchange)
        for chunk, exchange in zip(chunks, exchanges, strict=True)
    ]
    results = [dispatcher.combine(routed.x_SD, routed) for routed in arrived]
    scores = [routed.scores_R[: routed.offsets_e[-1]] for routed in arrived]
    grads = [grad_TD for _, _, _, grad_TD in chunks] + [torch.full_like(placed, 2) for placed in scores]
    torch.autograd.backward([*results, *scores], grads)
    wrong = []
    for (x_TD, ids_TK, scores_TK, grad_TD), y_TD in zip(chunks, results, strict=True):
        ranks_TK = ids_TK // (equal_local.NUM_EXPERTS // dist.get_world_size())
        copies_T1 = torch.stack([(ranks_TK == p).any(1) for p in range(dist.get_world_size())]).sum(0)[:, None]
        pairs = ((y_TD, x_TD * copies_T1), (x_TD.grad, grad_TD * copies_T1), (scores_TK.grad, 2 + 0 * scores_TK))
        wrong += [(actual.isclose(expected).logical_not()).sum().cpu() for actual, expected in pairs]
    return wrong


def interleave_beside_a_slow_rank(folder: str, slow_rank: int) -> list[Tensor]:
    """The same, while one rank sleeps before each of its moves."""

    def slow(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any) -> Any:
            time.sleep(0.1 * (dist.get_rank() == slow_rank))
            return move(*args)

        return moved

    with pytest.MonkeyPatch.context() as patched:
        for name in (
            "exchange_counts",
            "plan_rows",
            "own_rows",
            "get_rows",
            "get_assignments",
            "put_rows",
            "sum_partial_results",
        ):
            patched.setattr(symm_mem, name, slow(getattr(symm_mem, name)))
        return interleave(folder)


def is_short_of_rows(dispatcher: SymmMemDispatcher, drawn: list[Tensor]) -> bool:
    """Whether more rows want to come to this rank than it has room for."""
    return bool(dispatcher.prepare(*drawn[1:3]).plan.overflowed)


def overflow(folder: str | None) -> list[tuple[int, int, bool, bool, Tensor]]:
    """For each routing, bounded and then not: rows that a rank made room for, rows that came, whether more had wanted
    to, whether all that this rank brought home is finite, and how far it is from what it should be."""
    memory, device = share(folder)
    capacity = ExpertCapacity(1.0, device)
    dispatcher = SymmMemDispatcher(equal_local.NUM_EXPERTS, memory, capacity=capacity)
    module, results = my_experts(device), []
    for routing in ("all_to_one_rank", "one_rank_empty"):
        drawn = my_inputs(routing, device)
        for is_unbounded in (False, True):
            module.zero_grad()
            poison(memory)
            with capacity.unbounded() if is_unbounded else mock.patch.object(capacity_module, "SLOTS_ALIGNMENT", 1):
                home = equal_local.serve(dispatcher, module, drawn)[:3]
                assert bool(capacity.overflowed) >= is_short_of_rows(dispatcher, drawn), "the step is told"
                capacity.reset()
                exchange = dispatcher.prepare(*drawn[1:3])
                is_short = bool(exchange.plan.overflowed)
                num_rows = dispatcher.finish_dispatch(
                    dispatcher.start_dispatch(drawn[0], exchange), exchange
                ).x_SD.shape[0]
            expected = equal_local.dense_oracle(tuple(tensor.cpu() for tensor in drawn))[:3]
            misses = [(actual.cpu() - wanted).abs().max() for actual, wanted in zip(home, expected, strict=True)]
            is_finite = all(bool(tensor.isfinite().all()) for tensor in home)
            came = int(exchange.plan.recv_offsets_Q[-1])
            results.append((num_rows, came, is_short, is_finite, torch.stack(misses).max()))
    return results


def test_a_copy_keeps_the_memory_that_peers_know() -> None:
    memory = SymmMemory(torch.zeros(8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), 0)
    copied = copy.deepcopy(SymmMemDispatcher(8, memory))
    assert copied.memory is memory


def open_on_hosts_of_their_own() -> str:
    """What a rank is told that has a host for itself."""
    with (
        mock.patch("socket.gethostname", return_value=f"host{dist.get_rank()}"),
        pytest.raises(ValueError) as refused,
    ):
        open_symm_memory(1024, dist.group.WORLD, torch.device("cuda"))
    return str(refused.value)


def test_ranks_of_several_hosts_are_refused(ranks) -> None:
    for words in ranks(2, open_on_hosts_of_their_own):
        assert (
            'are on 2: host0, host1; take a smaller parallel.ep, or parallel.dispatcher = "allgather" or "alltoall"'
            in words
        )


@pytest.mark.interpreted
@pytest.mark.parametrize(("num_ranks", "routings"), [(2, equal_local.ROUTINGS), (4, ("skewed", "one_rank_empty"))])
def test_files_equal_dense_oracle(ranks, tmp_path: Path, num_ranks: int, routings: tuple[str, ...]) -> None:
    check_routings(ranks(num_ranks, run_routings, str(tmp_path), routings), routings)


@pytest.mark.interpreted
def test_files_with_clones_equal_dense_oracle(ranks, tmp_path: Path) -> None:
    routings = ("skewed", "all_to_one_rank", "dropped_choices")
    check_routings(ranks(2, run_routings, str(tmp_path), routings, MOST_SPARE), routings)


@pytest.mark.interpreted
@pytest.mark.parametrize("num_replicas", [0, 1])
def test_files_compile_as_one_graph(ranks, tmp_path: Path, num_replicas: int) -> None:
    for eager, compiled in ranks(2, compile_two_layers, str(tmp_path), num_replicas):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.interpreted
def test_exchanges_of_a_graph_have_one_order(ranks, tmp_path: Path) -> None:
    assert ranks(2, find_orders, str(tmp_path)) == [(True, True)] * 2


@pytest.mark.interpreted
def test_files_dispatch_in_a_loop(ranks, tmp_path: Path) -> None:
    assert ranks(2, stress, str(tmp_path), 20) == [0, 0]


@pytest.mark.interpreted
def test_files_send_no_row_that_has_no_room(ranks, tmp_path: Path) -> None:
    check_overflow(ranks(2, overflow, str(tmp_path)))


@pytest.mark.interpreted
def test_ranks_wait_for_a_slow_one(ranks, tmp_path: Path) -> None:
    """A rank that is late to write or to read is neither read nor written over before its time."""
    for slow_rank in (0, 1):
        folder = tmp_path / str(slow_rank)
        folder.mkdir()
        for wrong in ranks(2, interleave_beside_a_slow_rank, str(folder), slow_rank):
            assert not any(wrong)


def check_overflow(answers: list[list[tuple[int, int, bool, bool, Tensor]]]) -> None:
    """There is room for the rows of random routing, and no more; without the bound, for those that come."""
    worst = len(answers) * equal_local.NUM_TOKENS
    for rank, (full, full_lifted, empty, empty_lifted) in enumerate(answers):
        assert full[0] == empty[0] < worst
        assert full_lifted[0] == full_lifted[1] and empty_lifted[0] == empty_lifted[1]
        # all rows want to come to the first rank, and only there is it known
        assert full[1:3] == ((full[0], True) if rank == 0 else (0, False))
        assert full_lifted[1:3] == ((worst, False) if rank == 0 else (0, False))
        assert empty[1] <= empty[0] and not empty_lifted[2]
        assert all(is_finite for _, _, _, is_finite, _ in answers[rank])
        assert max(full_lifted[4], empty_lifted[4]) < 1e-11
    assert max(full[4] for full, *_ in answers) > 1e-3, "what did not fit is missing"


needs_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs at least two GPUs")
RANKS = [n for n in (2, 4, 8) if n <= NUM_GPUS] or [2]


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
def test_gpus_equal_dense_oracle(ranks_of_a_size, num_ranks: int) -> None:
    answers = ranks_of_a_size(num_ranks, run_routings, None, equal_local.ROUTINGS)
    check_routings(answers, equal_local.ROUTINGS)


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
def test_gpus_with_clones_equal_dense_oracle(ranks_of_a_size, num_ranks: int) -> None:
    check_routings(ranks_of_a_size(num_ranks, run_routings, None, equal_local.ROUTINGS, 1), equal_local.ROUTINGS)


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
def test_gpus_serve_two_chunks_at_once(ranks_of_a_size, num_ranks: int) -> None:
    for wrong in ranks_of_a_size(num_ranks, interleave, None):
        assert not any(wrong)


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
def test_gpus_send_no_row_that_has_no_room(ranks_of_a_size, num_ranks: int) -> None:
    check_overflow(ranks_of_a_size(num_ranks, overflow, None))


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_replicas", [0, 1])
def test_gpus_compile_as_one_graph(ranks_of_a_size, num_ranks: int, num_replicas: int) -> None:
    for eager, compiled in ranks_of_a_size(num_ranks, compile_two_layers, None, num_replicas):
        torch.testing.assert_close(compiled, eager, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize("num_ranks", RANKS)
def test_gpus_dispatch_ten_thousand_times(ranks_of_a_size, num_ranks: int) -> None:
    assert ranks_of_a_size(num_ranks, stress, None, 10_000) == [0] * num_ranks
