"""The dense feed-forward layer: what it saves for backward, and its width."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from titan_moe.config.kernels import PRESETS
from titan_moe.layers.mlp import MLP, GatedMLP

TOKENS, WIDTH, HIDDEN = 6, 16, 40
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


def kept(mlp: torch.nn.Module, x_TD: Tensor) -> list[tuple[int, ...]]:
    """Shapes of saved tensors; then runs backward."""
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y_TD = mlp(x_TD)
    y_TD.sum().backward()
    return shapes


@pytest.mark.parametrize("kind", [MLP, GatedMLP])
@pytest.mark.parametrize("device", DEVICES)
def test_mlp_fused_saves_no_activation(kind: type, device: str) -> None:
    torch.manual_seed(0)
    x_TD = torch.randn(TOKENS, WIDTH, device=device, requires_grad=True)
    plain = kind(WIDTH, HIDDEN).to(device)
    fused = kind(WIDTH, HIDDEN, PRESETS["fused"]).to(device)
    fused.load_state_dict(plain.state_dict())
    torch.testing.assert_close(fused(x_TD), plain(x_TD))
    assert (TOKENS, HIDDEN) in kept(plain, x_TD)
    assert (TOKENS, HIDDEN) not in kept(fused, x_TD)
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_mlp_width_comes_from_the_weights() -> None:
    """A tensor-parallel rank has some columns of gate and up, and the rows of down that read them."""
    torch.manual_seed(0)
    whole, x_TD = MLP(WIDTH, HIDDEN), torch.randn(TOKENS, WIDTH)
    parts = []
    for rank in range(2):
        part = MLP(WIDTH, HIDDEN)
        gate, up = (x.chunk(2)[rank] for x in whole.gate_up.weight.chunk(2))
        part.gate_up.weight = torch.nn.Parameter(torch.cat([gate, up]))
        part.down.weight = torch.nn.Parameter(whole.down.weight.chunk(2, dim=1)[rank])
        parts.append(part(x_TD))
    torch.testing.assert_close(parts[0] + parts[1], whole(x_TD))


@pytest.mark.parametrize("device", DEVICES)
def test_mlp_frozen_projection_costs_no_gemm(device: str) -> None:
    mlp = MLP(WIDTH, HIDDEN, PRESETS["fused"]).to(device)
    flops = []
    for trains in (True, False):
        mlp.down.weight.requires_grad_(trains)
        with FlopCounterMode(display=False) as counter:
            mlp(torch.randn(TOKENS, WIDTH, device=device)).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] - flops[1] == 2 * TOKENS * WIDTH * HIDDEN
