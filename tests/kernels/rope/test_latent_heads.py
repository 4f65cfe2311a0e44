"""latent_heads beyond the registry's tests: strided gradients, a whole layer, refused arguments."""

import pytest
import torch
from support.kernel_samples import SAMPLES
from torch import Tensor

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.kernels.rope.latent_heads import latent_heads, latent_heads_reference
from titan_moe.layers.attention import Context
from titan_moe.layers.mla import MultiHeadLatentAttention
from titan_moe.layers.rope import rope_tables

WIDTHS = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-5, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "dtype", "limit"), DEVICES)
def test_gradients_have_any_strides(device: str, dtype: torch.dtype, limit: float) -> None:
    """Heads before positions, or one number for all."""
    torch.manual_seed(0)
    for sample in SAMPLES["latent_heads"].draw(torch.device(device), dtype)[:3]:
        leaves = [leaf.detach().requires_grad_() for leaf in sample.args[:3]]
        actual, expected = (op(*leaves, *sample.args[3:]) for op in (latent_heads, latent_heads_reference))
        assert all(out.is_contiguous() for out in actual)
        q, k, v = (torch.randn_like(out.transpose(1, 2).contiguous()).transpose(1, 2) for out in actual)
        for grads in ((q, k, v), (torch.ones((), device=device, dtype=dtype).expand_as(q), k.contiguous(), v)):
            ours, theirs = (torch.autograd.grad(outs, leaves, grads, retain_graph=True) for outs in (actual, expected))
            for one, other in zip(ours, theirs, strict=True):
                assert (one - other).norm() <= limit * other.norm(), sample.name


def results(kernels: Kernels, device: str, dtype: torch.dtype, *, is_interleaved: bool) -> list[Tensor]:
    """Output of a layer, and gradients of its input and parameters."""
    torch.manual_seed(0)
    config = AttentionConfig(kind="mla", num_heads=5, rope_is_interleaved=is_interleaved, **WIDTHS)
    layer = MultiHeadLatentAttention(ModelConfig(hidden_size=32, attention=config), kernels)
    x_BND = torch.randn(2, 19, 32)
    layer, x_BND = layer.to(device, dtype), x_BND.to(device, dtype).requires_grad_()
    y_BND = layer(x_BND, Context(*rope_tables(config, 19, x_BND.device), None))
    return [y_BND.detach(), *torch.autograd.grad(y_BND.sin().sum(), [x_BND, *layer.parameters()])]


@pytest.mark.parametrize(("device", "dtype", "limit"), DEVICES)
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_a_layer_is_that_of_pytorch(is_interleaved: bool, device: str, dtype: torch.dtype, limit: float) -> None:
    fused = results(Kernels(rotary="triton"), device, dtype, is_interleaved=is_interleaved)
    for ours, theirs in zip(fused, results(Kernels(), device, dtype, is_interleaved=is_interleaved), strict=True):
        assert (ours - theirs).norm() < limit * theirs.norm()


def test_fp64_is_refused() -> None:
    empty = torch.empty(0, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match='got torch.float64; take perf.override.rotary = "torch"'):
        latent_heads(empty, empty, empty[:, :, None], empty[:, 0], empty[:, 0], 4, 4, True)
