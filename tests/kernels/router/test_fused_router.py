"""The Triton router beyond the registry's tests: each output, ties, non-finite logits, the layer around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.kernels.router.fused_router import route_tokens
from titan_moe.kernels.router.routing import Routing, RoutingRule, route_tokens_reference
from titan_moe.layers.choice import KeptChoice, nothing_chosen
from titan_moe.layers.forced_routing import ForcedBalance
from titan_moe.layers.router import TopKRouter

DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
SIGMOID = RoutingRule("sigmoid", 3, route_scale=2.5)
CASES = {
    "softmax": (12, RoutingRule("softmax", 2)),
    "sigmoid": (40, SIGMOID),
    "not_normalised": (12, RoutingRule("softmax", 3, normalize_topk=False, route_scale=16.0)),
    "sqrtsoftplus": (40, RoutingRule("sqrtsoftplus", 3, route_scale=1.5, counts_by_score=True)),
    "sqrtsoftplus_groups": (20, RoutingRule("sqrtsoftplus", 3, num_groups=4, top_k_groups=2, normalize_topk=False)),
    "groups_of_one": (5, SIGMOID._replace(num_groups=5, top_k_groups=4)),
    "groups": (20, SIGMOID._replace(num_groups=4, top_k_groups=2)),
    "groups_by_share": (
        30,
        SIGMOID._replace(top_k=6, num_groups=5, top_k_groups=2, group_score="top_share_sum", counts_by_score=True),
    ),
    "softmax_by_score": (12, RoutingRule("softmax", 2, counts_by_score=True)),
    "sigmoid_by_score": (40, SIGMOID._replace(counts_by_score=True)),
    "groups_by_score": (20, SIGMOID._replace(num_groups=4, top_k_groups=2, counts_by_score=True)),
    "padded_groups_by_score": (33, SIGMOID._replace(num_groups=3, top_k_groups=1, counts_by_score=True)),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    torch.manual_seed(0)
    return torch.device(request.param)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def draw_logits(num_experts: int, device: torch.device, num_tokens: int = 19) -> tuple[Tensor, Tensor]:
    logits_BNE = torch.randn(2, num_tokens, num_experts, device=device)
    return logits_BNE.requires_grad_(), torch.randn(num_experts, device=device) / 10


def in_expert_order(routing: Routing) -> Routing:
    ids, order = routing.topk_ids_BNK.sort(-1)
    return routing._replace(topk_scores_BNK=routing.topk_scores_BNK.gather(-1, order), topk_ids_BNK=ids)


@pytest.mark.parametrize("name", CASES)
def test_route_tokens_equals_reference(name: str, device: torch.device) -> None:
    num_experts, rule = CASES[name]
    logits_BNE, bias_E = draw_logits(num_experts, device)
    with poisoned():
        actual = in_expert_order(route_tokens(logits_BNE, bias_E, rule))
    for field, got, expected_output in zip(
        Routing._fields, actual, in_expert_order(route_tokens_reference(logits_BNE, bias_E, rule)), strict=True
    ):
        torch.testing.assert_close(got, expected_output, msg=lambda text, field=field: f"{field}: {text}")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("field", ["topk_scores_BNK", "share_sums_BE", "z_sum"])
def test_route_tokens_gradient_of_each_output_equals_reference(field: str, name: str, device: torch.device) -> None:
    num_experts, rule = CASES[name]
    logits_BNE, bias_E = draw_logits(num_experts, device)
    wide_BNE = logits_BNE.detach().double().requires_grad_()
    expected = getattr(in_expert_order(route_tokens_reference(wide_BNE, bias_E, rule)), field)
    direction = torch.randn_like(expected)
    (expected * direction).sum().backward()
    with poisoned():
        output = getattr(in_expert_order(route_tokens(logits_BNE, bias_E, rule)), field)
        (output * direction.float()).sum().backward()
    torch.testing.assert_close(logits_BNE.grad.double(), wide_BNE.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("by_score")])
def test_route_tokens_counts_by_score_are_those_without_bias_and_groups(name: str, device: torch.device) -> None:
    num_experts, rule = CASES[name]
    logits_BNE, bias_E = draw_logits(num_experts, device)
    routing = route_tokens(logits_BNE, bias_E, rule)
    plain = rule._replace(counts_by_score=False)
    without = route_tokens(logits_BNE, torch.zeros_like(bias_E), plain._replace(num_groups=1, top_k_groups=1))
    assert torch.equal(routing.aux_counts_BE, without.counts_BE)
    assert torch.equal(without.aux_counts_BE, without.counts_BE)
    unbiased = route_tokens(logits_BNE, torch.zeros_like(bias_E), rule)
    assert torch.equal(unbiased.aux_counts_BE, without.counts_BE)
    assert not torch.equal(routing.aux_counts_BE, routing.counts_BE)
    selected = route_tokens(logits_BNE, bias_E, plain)
    for field in ("topk_scores_BNK", "topk_ids_BNK", "counts_BE"):
        assert torch.equal(getattr(routing, field), getattr(selected, field)), f"{field} does not change"


def test_route_tokens_with_forced_ids_equals_reference(device: torch.device) -> None:
    logits_BNE, bias_E = draw_logits(20, device)
    forced_BNK = torch.rand_like(logits_BNE).topk(3).indices
    in_groups = SIGMOID._replace(num_groups=4, top_k_groups=1)
    for rule in (SIGMOID, in_groups, in_groups._replace(counts_by_score=True)):
        actual = route_tokens(logits_BNE, bias_E, rule, forced_BNK.int())
        expected = route_tokens_reference(logits_BNE, bias_E, rule, forced_BNK)
        assert torch.equal(actual.aux_counts_BE, actual.counts_BE)
        for got, expected_output in zip(actual, expected, strict=True):
            torch.testing.assert_close(got, expected_output)


@pytest.mark.parametrize("rule", [SIGMOID, SIGMOID._replace(num_groups=4, top_k_groups=2)], ids=["free", "groups"])
def test_route_tokens_takes_kept_ids_and_the_counts_of_its_scores(rule: RoutingRule, device: torch.device) -> None:
    logits_BNE, bias_E = draw_logits(20, device)
    by_score = rule._replace(counts_by_score=True)
    first = route_tokens(logits_BNE, bias_E, by_score)
    other_E = torch.randn_like(bias_E)
    kept_BNK = first.topk_ids_BNK.int()
    again = route_tokens(logits_BNE, other_E, by_score, kept_ids_BNK=kept_BNK)
    for got, expected_output in zip(again, first, strict=True):
        assert torch.equal(got, expected_output)
    kept_BNK[:, 5:] = -1  # these tokens choose
    mixed, chosen = (route_tokens(logits_BNE, other_E, by_score, None, kept) for kept in (kept_BNK, None))
    assert torch.equal(mixed.topk_ids_BNK[:, :5], first.topk_ids_BNK[:, :5])
    assert torch.equal(mixed.topk_ids_BNK[:, 5:], chosen.topk_ids_BNK[:, 5:])
    assert not torch.equal(mixed.topk_ids_BNK, chosen.topk_ids_BNK)


def test_route_tokens_selects_lowest_expert_id_on_ties(device: torch.device) -> None:
    logits_BNE, bias_E = torch.zeros(1, 3, 12, device=device), torch.zeros(12, device=device)
    assert route_tokens(logits_BNE, bias_E, SIGMOID).topk_ids_BNK.tolist() == [[[0, 1, 2]] * 3]
    bias_E[7] = 1.0
    in_groups = SIGMOID._replace(num_groups=4, top_k_groups=2)
    assert route_tokens(logits_BNE, bias_E, in_groups).topk_ids_BNK.tolist() == [[[7, 0, 1]] * 3]
    by_score = route_tokens(logits_BNE, bias_E, in_groups._replace(counts_by_score=True)).aux_counts_BE
    assert by_score.tolist() == [[3, 3, 3] + [0] * 9]


@pytest.mark.parametrize("group_score", ["max", "top2_sum", "top_share_sum"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_route_tokens_selects_distinct_experts_for_non_finite_logits(
    value: float, group_score: str, device: torch.device
) -> None:
    logits_BNE = torch.randn(1, 4, 12, device=device)
    logits_BNE[0, 0, 3], logits_BNE[0, 1, :] = value, value
    bias_E = torch.zeros(12, device=device)
    bias_E[2:] = float("-inf")  # two finite biases, top-3
    for rule in (SIGMOID, SIGMOID._replace(num_groups=3, top_k_groups=1, group_score=group_score)):
        routing = route_tokens(logits_BNE, bias_E, rule._replace(counts_by_score=True))
        assert all(len(set(ids)) == 3 and set(ids) <= set(range(12)) for ids in routing.topk_ids_BNK[0].tolist())
        assert routing.aux_counts_BE.sum() == 4 * 3 and routing.aux_counts_BE.max() <= 4


def test_route_tokens_is_deterministic(device: torch.device) -> None:
    logits_BNE, bias_E = draw_logits(128, device, num_tokens=4096 if device.type == "cuda" else 9)

    def run() -> list[Tensor]:
        routing = route_tokens(logits_BNE, bias_E, RoutingRule("softmax", 8, counts_by_score=True))
        loss = routing.topk_scores_BNK.square().sum() + routing.share_sums_BE.square().sum() + routing.z_sum
        return [*routing, *torch.autograd.grad(loss, logits_BNE)]

    first = run()
    for _ in range(3):
        assert all(torch.equal(got, expected_output) for got, expected_output in zip(run(), first, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_route_tokens_refuses_logits_that_are_not_fp32(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match='override.router = "torch"'):
        route_tokens(torch.zeros(1, 2, 4, dtype=dtype), torch.zeros(4), SIGMOID)


MOE = MoEConfig(num_experts=12, top_k=3, score_fn="sigmoid", aux_loss_coef=0.3, z_loss_coef=0.05)
BY_SCORE = replace(MOE, num_groups=4, top_k_groups=2)
CONFIG = ModelConfig(hidden_size=16, moe=MOE)


def build_router(moe: MoEConfig, backend: Any, device: torch.device, is_forced: bool = False) -> TopKRouter:
    torch.manual_seed(0)
    router = TopKRouter(replace(CONFIG, moe=moe), Kernels(router=backend)).to(device)
    torch.nn.init.normal_(router.weight, std=0.5)
    router.expert_bias_E.normal_(std=0.1)
    if is_forced:
        router.force = ForcedBalance(moe, device)
    return router


@pytest.mark.parametrize("is_forced", [False, True], ids=["free", "forced"])
def test_router_layer_with_a_kept_choice_repeats_the_first_forward(is_forced: bool, device: torch.device) -> None:
    router, runs = build_router(BY_SCORE, "triton", device, is_forced), []
    x_BND, kept = torch.randn(2, 19, 16, device=device), nothing_chosen(2, 19, 12, 3, device)
    torch._dynamo.reset()
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    free = router.route
    for run in (router, compiled, compiled):
        router.route, router.weight.grad = KeptChoice(free, *kept), None
        scores_TK, ids_TK = run(x_BND)
        (scores_TK * (1 + ids_TK)).sum().backward()
        runs.append((ids_TK, scores_TK, router.weight.grad))
        router.expert_bias_E.normal_()
    for again in runs[1:]:
        torch.testing.assert_close(again, runs[0])
    assert torch.equal(router.balance.tokens_per_expert_E, 3 * runs[0][0].flatten().bincount(minlength=12))
    router.route = free
    assert is_forced or not torch.equal(router(x_BND)[1], runs[0][0])


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("is_forced", [False, True], ids=["free", "forced"])
@pytest.mark.parametrize("moe", [MOE, BY_SCORE], ids=["kept_bias", "groups"])
def test_router_layer_is_equal_with_both_kernels(
    moe: MoEConfig, is_forced: bool, mode: str, device: torch.device
) -> None:
    routers = [build_router(moe, backend, device, is_forced) for backend in ("torch", "triton")]
    x_BND = torch.randn(2, 19, 16, device=device)
    torch._dynamo.reset()
    for router in routers:
        run = torch.compile(router, fullgraph=True, backend="aot_eager") if mode == "compiled" else router
        scores_TK, ids_TK = run(x_BND)
        (scores_TK * (1 + ids_TK)).sum().backward()
    plain, fused = routers
    torch.testing.assert_close(fused.weight.grad, plain.weight.grad, atol=1e-4, rtol=1e-4)
    for (name, buffer), other in zip(fused.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, msg=lambda text, name=name: f"{name}: {text}")
    assert fused.balance.tokens_per_expert_E.sum() == 2 * 19 * 3


class BackwardArguments(TorchDispatchMode):
    """Record the arguments of the router's backward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.titan_moe.route_tokens_backward.default:
            self.args = args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("aux", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
def test_router_backward_gets_no_gradient_of_a_loss_with_coefficient_zero(
    aux: float, z: float, device: torch.device
) -> None:
    router = build_router(replace(MOE, aux_loss_coef=aux, z_loss_coef=z), "triton", device)
    scores_TK, _ = router(torch.randn(2, 19, 16, device=device))
    with BackwardArguments() as recorded:
        scores_TK.sum().backward()
    _, _, dtopk, dshares, dz, *_ = recorded.args
    assert (dtopk is not None, dshares is not None, dz is not None) == (True, aux > 0, z > 0)


@pytest.mark.gpu
def test_router_forward_and_backward_are_capturable() -> None:
    router = build_router(replace(MOE, num_experts=64, top_k=8), "triton", torch.device("cuda"))
    x_BND = torch.randn(2, 512, 16, device="cuda")

    def step() -> tuple[Tensor, Tensor]:
        scores_TK, ids_TK = router(x_BND)
        return ids_TK, torch.autograd.grad(scores_TK.square().sum(), router.weight)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x_BND.normal_()
    graph.replay()
    assert all(torch.equal(got, expected_output) for got, expected_output in zip(captured, step(), strict=True))
