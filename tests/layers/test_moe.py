"""The MoE layer against its formula, and in a user's own model."""

import copy
import doctest
import io
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.kernels.permute.counting_sort import counting_sort
from titan_moe.kernels.permute.permutation import sort_by_expert
from titan_moe.layers import moe as module
from titan_moe.layers.moe import MoE

WIDTH = 16
PLAIN = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=12)
VARIANTS = {
    "plain": PLAIN,
    "shared": replace(PLAIN, shared_ffn_hidden_size=10),
    "gated shared": replace(PLAIN, shared_ffn_hidden_size=10, shared_expert_gate=True),
    "latent": replace(PLAIN, latent_size=6),
    "everything": replace(
        PLAIN,
        shared_ffn_hidden_size=10,
        shared_expert_gate=True,
        latent_size=6,
        score_fn="sigmoid",
        route_scale=2.5,
        num_groups=4,
        top_k_groups=2,
    ),
}


def built(moe: MoEConfig) -> MoE:
    torch.manual_seed(0)
    layer = MoE(ModelConfig(hidden_size=WIDTH, moe=moe), kernels=Kernels(experts="reference")).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ down.T


def formula(layer: MoE, x_BND: Tensor) -> Tensor:
    """Every expert computes every token; those that were not selected have weight 0."""
    weights = dict(layer.named_parameters())
    scores_TK, ids_TK = layer.router(x_BND)
    x_TD = x_BND.flatten(0, 1)
    weight_TE = torch.zeros(len(x_TD), 8, dtype=x_TD.dtype).scatter(1, ids_TK, scores_TK)
    latent_TL = x_TD @ weights["latent_down.weight"].T if "latent_down.weight" in weights else x_TD
    experts = zip(weights["experts.gate_up"].flatten(1, 2), weights["experts.down"], strict=True)
    y_ETL = torch.stack([swiglu(latent_TL, gate_up, down) for gate_up, down in experts])
    y_TD = torch.einsum("te,etl->tl", weight_TE, y_ETL)
    if "latent_up.weight" in weights:
        y_TD = y_TD @ weights["latent_up.weight"].T
    shared = {name.rsplit(".", 2)[-2]: w for name, w in weights.items() if name.startswith("shared_experts")}
    if shared:
        gate_T1 = torch.sigmoid(x_TD @ shared["gate"].T) if "gate" in shared else 1.0
        y_TD = y_TD + gate_T1 * swiglu(x_TD, shared["gate_up"], shared["down"])
    return y_TD.view_as(x_BND)


@pytest.mark.parametrize("variant", VARIANTS)
def test_moe_equals_the_formula(variant: str) -> None:
    layer, x_BND = built(VARIANTS[variant]), torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x_BND), formula(layer, x_BND)
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)
    direction, inputs = torch.randn_like(expected), (x_BND, *layer.parameters())
    actual_gradients, expected_gradients = (torch.autograd.grad(y, inputs, direction) for y in (actual, expected))
    assert all(gradient.any() for gradient in actual_gradients)
    torch.testing.assert_close(actual_gradients, expected_gradients, atol=1e-11, rtol=1e-9)


def test_moe_absent_parts_have_no_weights() -> None:
    assert {name for name, _ in built(PLAIN).named_parameters()} == {"router.weight", "experts.gate_up", "experts.down"}


def test_moe_permute_is_the_chosen_backend() -> None:
    config = ModelConfig(hidden_size=WIDTH, moe=PLAIN)
    assert MoE(config).dispatcher.permute is sort_by_expert
    assert MoE(config, kernels=Kernels(permute="triton")).dispatcher.permute is counting_sort


class Composed(nn.Module):
    """A user's module with the layer."""

    def __init__(self) -> None:
        super().__init__()
        moe = replace(PLAIN, shared_ffn_hidden_size=16, aux_loss_coef=1e-3)
        self.inward, self.outward = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.moe = MoE(ModelConfig(hidden_size=WIDTH, moe=moe))

    def forward(self, x_BN4: Tensor) -> Tensor:
        x_BND = self.inward(x_BN4)
        return self.outward(x_BND + self.moe(x_BND))


@pytest.mark.slow
def test_moe_trains_in_a_users_module_without_a_process_group() -> None:
    assert not dist.is_initialized()
    torch.manual_seed(0)
    model = Composed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x_BN4 = torch.randn(4, 16, 4)
    target_BN4 = x_BN4.sin().roll(1, dims=-1) * x_BN4.sign()
    losses = []
    for _ in range(150):
        loss = F.mse_loss(model(x_BN4), target_BN4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0], losses[::30]
    assert model.moe.router.balance.tokens_per_expert_E.sum() == 150 * 4 * 16 * PLAIN.top_k


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that is not written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


WITH_BIASES = replace(VARIANTS["everything"], latent_size=32, expert_mlp_bias=True)
INIT_CONFIG = ModelConfig(hidden_size=48, num_layers=8, init_std=0.1, moe=WITH_BIASES)
RESIDUAL_ENDS = ("latent_up.weight", "experts.down", "shared_experts.mlp.down.weight")


@pytest.mark.usefixtures("poisoned_memory")
def test_moe_comes_initialised() -> None:
    torch.manual_seed(0)
    first, second = MoE(INIT_CONFIG), MoE(INIT_CONFIG)
    for name, parameter in first.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        else:
            spread = 0.1 / 4 if name in RESIDUAL_ENDS else 0.1
            assert parameter.std().item() == pytest.approx(spread, rel=5 / math.sqrt(2 * parameter.numel())), name
            assert not torch.equal(parameter, second.get_parameter(name)), "layers differ"
    assert not any(buffer.any() for name, buffer in first.named_buffers() if not name.endswith("scale"))
    assert first(torch.randn(2, 3, 48)).isfinite().all()


@pytest.mark.usefixtures("poisoned_memory")
def test_moe_on_meta_is_initialised_after_to_empty() -> None:
    expected = MoE(INIT_CONFIG)
    with torch.device("meta"):
        layer = MoE(INIT_CONFIG)
    layer.to_empty(device="cpu")
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.detach().fill_(7)
    for each in (expected, layer):
        torch.manual_seed(5)
        each.reset_parameters()
    torch.testing.assert_close(dict(layer.named_parameters()), dict(expected.named_parameters()), rtol=0, atol=0)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)
    assert layer.router.balance.scale == 1


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("assign", [False, True])
def test_moe_on_meta_has_the_start_values_of_buffers_that_a_state_dict_lacks(assign: bool) -> None:
    expected = MoE(INIT_CONFIG)
    with torch.device("meta"):
        layer = MoE(INIT_CONFIG)
    if not assign:
        layer.to_empty(device="cpu")
    without_bias = {name: value for name, value in expected.state_dict().items() if "expert_bias" not in name}
    layer.load_state_dict(without_bias, strict=False, assign=assign)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("experts", ["grouped_mm", "reference"])
def test_moe_is_saved_whole_and_copied(variant: str, experts: str) -> None:
    moe = replace(VARIANTS[variant], ffn_hidden_size=16, latent_size=16 if VARIANTS[variant].latent_size else 0)
    layer, file = MoE(ModelConfig(hidden_size=WIDTH, moe=moe), kernels=Kernels(experts=experts)), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded, x_BND = torch.load(file, weights_only=False), torch.randn(2, 7, WIDTH)
    for other in (loaded, copy.deepcopy(layer), copy.deepcopy(loaded)):
        torch.testing.assert_close(other(x_BND), layer(x_BND), rtol=0, atol=0)
        other(x_BND).sum().backward()
        assert other.router.balance.tokens_per_expert_E.sum() == 2 * 7 * moe.top_k
    assert not layer.router.balance.tokens_per_expert_E.any()


@pytest.mark.parametrize("shape", [(0, 4, WIDTH), (2, 0, WIDTH), (0, 0, WIDTH)])
@pytest.mark.parametrize("experts", ["grouped_mm", "reference"])
def test_moe_of_no_tokens(shape: tuple[int, ...], experts: str) -> None:
    moe = replace(VARIANTS["everything"], ffn_hidden_size=16, latent_size=16, aux_loss_coef=0.1, z_loss_coef=0.1)
    layer, x_BND = MoE(ModelConfig(hidden_size=WIDTH, moe=moe), kernels=Kernels(experts=experts)), torch.zeros(shape)
    y_BND = layer(x_BND)
    assert y_BND.shape == x_BND.shape
    y_BND.sum().backward()
    assert not any(parameter.grad.any() for parameter in layer.parameters())


def test_moe_names_the_shape_that_it_takes() -> None:
    layer = MoE(ModelConfig(hidden_size=WIDTH, moe=PLAIN))
    for shape in ((7, WIDTH), (WIDTH,), (2, 2, 7, WIDTH), (2, 7, WIDTH + 1)):
        with pytest.raises(ValueError, match=r"takes hidden states \[B, N, 16\]"):
            layer(torch.zeros(shape))


def test_moe_docstring_example_runs() -> None:
    assert doctest.testmod(module).failed == 0


UNFIT = {
    "experts": (Kernels(experts="fused"), torch.float32, 'or take kernels.experts = "grouped_mm"'),
    "router": (
        Kernels(router="triton"),
        torch.float32,
        'kernels.router = "triton" is in Triton, which does not run on',
    ),
    "permute": (Kernels(permute="triton"), torch.float32, 'or take kernels.permute = "torch"'),
    "fp64": (Kernels(), torch.float64, 'got torch.float64 in widths 24 and 16; take kernels.experts = "reference"'),
    "bf16": (Kernels(), torch.bfloat16, "got torch.bfloat16 in widths 16 and 12; take kernels"),  # 24 bytes
}


@pytest.mark.parametrize("case", UNFIT)
def test_moe_names_the_field_of_kernels_that_do_not_fit(case: str) -> None:
    kernels, dtype, expected = UNFIT[case]
    layer = MoE(ModelConfig(hidden_size=WIDTH, moe=PLAIN), kernels=kernels).to(dtype)
    with pytest.raises(ValueError, match=re.escape(expected)):
        layer(torch.randn(1, 4, WIDTH, dtype=dtype))


def test_moe_refuses_a_bad_config() -> None:
    with pytest.raises(ValueError, match='model.moe.score_fn = "tanh" must be one of "softmax", "sigmoid"'):
        MoE(ModelConfig(hidden_size=WIDTH, moe=replace(PLAIN, score_fn="tanh")))


def test_moe_of_a_width_is_that_of_a_model_config() -> None:
    torch.manual_seed(0)
    of_width = MoE(WIDTH, PLAIN)
    torch.manual_seed(0)
    of_model = MoE(ModelConfig(hidden_size=WIDTH, moe=PLAIN))
    assert of_width.config == of_model.config and str(of_width) == str(of_model)
    assert all(torch.equal(a, b) for a, b in zip(of_width.parameters(), of_model.parameters(), strict=True))
    sizes = f"GroupedExperts({PLAIN.num_experts} experts, {WIDTH} -> {PLAIN.ffn_hidden_size} -> {WIDTH}, bias=False)"
    assert sizes in str(of_width) and f"{WIDTH} -> {PLAIN.num_experts} experts, top_k={PLAIN.top_k}" in str(of_width)


@pytest.mark.parametrize(
    "given", [(WIDTH,), (PLAIN,), (True, PLAIN), (ModelConfig(), PLAIN), (ModelConfig(), Kernels())]
)
def test_moe_says_what_it_takes_and_what_was_given(given: tuple[Any, ...]) -> None:
    names = ", ".join(type(value).__name__ for value in given)
    with pytest.raises(TypeError, match=f"a width and a MoEConfig.* got {names};"):
        MoE(*given)


def test_moe_gives_padding_the_shared_experts_alone() -> None:
    moe = replace(PLAIN, shared_ffn_hidden_size=16, aux_loss_coef=0.1, z_loss_coef=0.1, bias_update="quantile")
    torch.manual_seed(0)
    layer = MoE(ModelConfig(hidden_size=16, init_std=0.5, moe=moe), kernels=Kernels(experts="reference")).double()
    x_BND = torch.randn(2, 5, 16, dtype=torch.float64)
    valid_BN = torch.tensor([[True] * 5, [True, True, False, False, False]])
    y_BND = layer(x_BND, valid_BN)
    y_BND.sum().backward()
    assert layer.router.balance.tokens_per_expert_E.sum() == 7 * moe.top_k
    assert (layer.router.balance.margins_EQ.sum(1) == 7).all()
    torch.testing.assert_close(y_BND[valid_BN], layer(x_BND)[valid_BN])
    torch.testing.assert_close(y_BND[~valid_BN], layer.shared_experts(x_BND.flatten(0, 1)).view(2, 5, 16)[~valid_BN])
    with pytest.raises(ValueError, match=r"valid_BN is true for tokens .* bool \[2, 5\], and got"):
        layer(x_BND, valid_BN.int())
    dropping = MoE(16, replace(PLAIN, capacity_factor=1.0)).double()
    with pytest.raises(ValueError, match="capacity_factor is for all tokens"):
        dropping(x_BND, valid_BN)
