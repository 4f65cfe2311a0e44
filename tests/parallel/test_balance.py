"""The public calls of load balancing, on one process and on several ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from titan_moe import ModelConfig, MoE, MoEConfig, scale_balancing_losses, update_expert_biases
from titan_moe.config.kernels import Kernels
from titan_moe.parallel.balance import ExpertBalancer

WIDTH, SPEED = 16, 0.01


def layer(num_experts: int = 8, **moe: Any) -> MoE:
    config = MoEConfig(num_experts, top_k=2, ffn_hidden_size=8, **moe)
    return MoE(ModelConfig(hidden_size=WIDTH, init_std=0.5, moe=config), kernels=Kernels(experts="reference"))


def model() -> nn.Sequential:
    """Layers that differ in their experts and speeds."""
    torch.manual_seed(0)
    return nn.Sequential(
        layer(score_fn="sigmoid", bias_update_speed=SPEED),
        layer(num_experts=4),
        layer(score_fn="sigmoid", bias_update_speed=10 * SPEED),
    )


def data(num_steps: int = 5) -> Tensor:
    return torch.randn(num_steps, 4, 6, WIDTH, generator=torch.Generator().manual_seed(1))


def train(trained: nn.Module, rank: int = 0, num_ranks: int = 1, **options: Any) -> tuple[list[Any], list[Tensor]]:
    """Counts of each step, and the biases after it; two microbatches a step."""
    counts = []
    for x_BND in data():
        for x in x_BND.chunk(num_ranks)[rank].chunk(2):
            trained(x).square().mean().backward()
        counts.append(update_expert_biases(trained, **options))
    return counts, [module.expert_bias_E for module in trained.modules() if hasattr(module, "expert_bias_E")]


def test_biases_follow_the_counts_of_each_step() -> None:
    assert not dist.is_initialized()
    counts, biases = train(model())
    assert [list(step) for step in counts] == [["0.router", "1.router", "2.router"]] * 5
    for index, (speed, bias_E) in enumerate(zip((SPEED, 0.0, 10 * SPEED), biases, strict=True)):
        expected_E = torch.zeros_like(bias_E)
        for step in counts:
            count_E = step[f"{index}.router"]
            assert int(count_E.sum()) == 2 * 4 * 6, "two microbatches, and no step before"
            expected_E += speed * (count_E.float().mean() - count_E).sign()
        torch.testing.assert_close(bias_E, expected_E)
        assert bool(bias_E.any()) == (speed > 0)


def test_sums_start_anew() -> None:
    trained = nn.Sequential(layer(aux_loss_coef=0.1))
    (balance,) = (module.balance for module in trained.modules() if hasattr(module, "balance"))
    for _ in range(2):
        trained(data()[0]).sum().backward()
        assert balance.aux_loss.item() == pytest.approx(0.1, rel=0.5), "the coefficient, if the load is even"
        update_expert_biases(trained)
        assert not balance.tokens_per_expert_E.any() and balance.aux_loss == 0


def on_ranks(wrapper: str) -> tuple[list[Any], list[Tensor]]:
    trained: nn.Module = model()
    if wrapper == "ddp":
        trained = DistributedDataParallel(trained, broadcast_buffers=False)
    group = dist.group.WORLD if wrapper == "a group" else None
    counts, biases = train(trained, dist.get_rank(), dist.get_world_size(), group=group)
    return [{name.removeprefix("module."): c_E for name, c_E in step.items()} for step in counts], biases


@pytest.mark.parametrize("wrapper", ["none", "a group", "ddp"])
def test_ranks_count_the_tokens_of_all(ranks, wrapper: str) -> None:
    expected = train(model())
    for result in ranks(2, on_ranks, wrapper):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def in_groups_of_one() -> list[Tensor]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return train(model(), dist.get_rank(), dist.get_world_size(), group=groups[dist.get_rank()])[1]


def test_ranks_outside_the_group_do_not_count(ranks) -> None:
    first, second = ranks(2, in_groups_of_one)
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("call", [scale_balancing_losses, update_expert_biases])
def test_a_model_without_routers_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="the model has no titan_moe.TopKRouter; use titan_moe.MoE"):
        call(nn.Linear(2, 2))


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match='reduction = "none" is neither "mean" nor "sum"'):
        scale_balancing_losses(layer(), 1.0, "none")  # type: ignore[arg-type]


def test_the_factor_of_a_gradient_scaler_is_followed() -> None:
    torch.manual_seed(0)
    plain, scaled = layer(aux_loss_coef=0.1), layer(aux_loss_coef=0.1)
    scaled.load_state_dict(plain.state_dict())
    scale_balancing_losses(scaled, torch.tensor(1024.0))
    plain(data()[0]).mean().backward()
    (scaled(data()[0]).mean() * 1024).backward()
    torch.testing.assert_close(scaled.router.weight.grad, 1024 * plain.router.weight.grad)


def test_a_rank_without_routers_counts_on_the_device_of_the_step() -> None:
    on_meta = torch.zeros((), dtype=torch.bool, device="meta")
    counts = ExpertBalancer([nn.Linear(2, 2)], dist.group.WORLD, {"layers.0": 4}).finish(on_meta)
    assert counts["layers.0"].device.type == "meta" and counts["layers.0"].shape == (4,)


def test_biases_stay_fp32_in_a_bf16_model() -> None:
    trained = model().to(torch.bfloat16)
    biases = [module.router.expert_bias_E for module in trained]
    for bias_E in biases:
        bias_E.fill_(0.5)
    trained(data()[0].bfloat16()).sum().backward()
    update_expert_biases(trained)
    assert all(bias_E.dtype == torch.float32 for bias_E in biases)
    assert (biases[0] - 0.5).abs().max() == pytest.approx(SPEED), "bf16 has 0.5117, and nothing nearer"
    meta = trained.to("meta").to_empty(device="cpu")
    assert all(module.router.expert_bias_E.device.type == "cpu" for module in meta)
    assert model().double()[0].router.expert_bias_E.dtype == torch.float64


def test_quantiles_move_biases_to_balance_at_once() -> None:
    torch.manual_seed(0)
    moe = layer(bias_update="quantile", bias_ema=0.25)
    bias_E = moe.router.expert_bias_E
    moe(x_BND := torch.randn(1, 400, WIDTH) + 1).sum().backward()
    before = update_expert_biases(moe)["router"]
    first_E = bias_E.clone()
    assert first_E.any() and bias_E.sum().abs() < 1e-6
    moe(x_BND).sum().backward()
    after = update_expert_biases(moe)["router"]
    assert after.max() - after.min() < (before.max() - before.min()) / 2
    update_expert_biases(moe)  # of no token
    assert not torch.equal(first_E, kept_E := bias_E.clone()) and torch.equal(kept_E, bias_E)
    moe.router.weight.requires_grad_(False)
    moe(x_BND).sum().backward()
    update_expert_biases(moe)
    assert torch.equal(kept_E, bias_E), "a frozen router's stays"


def test_quantiles_are_averaged_by_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of them would be copied to the device in each step, which no capture can contain."""
    shares, x_BND = (0.25, 0.0, 0.25), data()[0]
    torch.manual_seed(0)
    moes = nn.ModuleList(layer(bias_update="quantile", bias_ema=share) for share in shares)
    for moe in moes:
        moe.load_state_dict(moes[0].state_dict())
        moe.router.expert_bias_E.copy_(torch.linspace(-0.1, 0.1, 8))
        moe(x_BND).sum().backward()
    monkeypatch.setattr(torch, "tensor", None)
    update_expert_biases(moes)
    first_E, new_E, third_E = (moe.router.expert_bias_E for moe in moes)
    assert torch.equal(first_E, third_E)
    torch.testing.assert_close(first_E, 0.75 * new_E + 0.25 * torch.linspace(-0.1, 0.1, 8), rtol=0, atol=1e-6)
