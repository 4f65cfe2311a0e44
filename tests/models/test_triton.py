"""A model with all Triton kernels trains as one with none."""

from dataclasses import replace

import pytest
import torch

from titan_moe.config.kernels import DEFAULT_KERNELS, PRESETS, Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.forced_routing import ForcedBalance
from titan_moe.layers.init import init_weights
from titan_moe.layers.router import TopKRouter
from titan_moe.models.transformer import Transformer

CONFIG = ModelConfig(
    vocab_size=40,
    num_layers=2,
    num_dense_layers=1,
    hidden_size=32,
    ffn_hidden_size=32,
    attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True),
    moe=MoEConfig(
        num_experts=6,
        top_k=2,
        ffn_hidden_size=16,
        shared_ffn_hidden_size=16,
        score_fn="sigmoid",
        num_groups=3,
        top_k_groups=2,
        aux_loss_coef=1e-2,
        z_loss_coef=1e-3,
    ),
)
MLA = AttentionConfig(kind="mla", num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
DEVICES = [
    pytest.param("cpu", torch.float32, 1e-4, marks=pytest.mark.interpreted),
    pytest.param("cuda", torch.bfloat16, 1e-2, marks=pytest.mark.gpu),
]


def trained(config: ModelConfig, kernels: Kernels, device: str, dtype: torch.dtype, is_forced: bool) -> Transformer:
    """A model with the gradients of one batch."""
    model = Transformer(config, kernels=kernels, loss_chunk_tokens=16).to(device)
    init_weights(model, seed=0, std=0.2, num_layers=config.num_layers)
    model.to(dtype)
    if is_forced:  # rounded otherwise, some token's best experts may be others: not an error, but a jump
        for module in model.modules():
            if isinstance(module, TopKRouter):
                module.force = ForcedBalance(config.moe, torch.device(device))
    for name, buffer in model.named_buffers():
        buffer.data = buffer.float() if name.endswith(("bias_E", "loss", "scale")) else buffer
    tokens = torch.randint(40, (2, 25), generator=torch.Generator().manual_seed(1)).to(device)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    model.loss = loss.detach()
    return model


@pytest.mark.parametrize(("device", "dtype", "tolerance"), DEVICES)
@pytest.mark.parametrize("attention", [CONFIG.attention, MLA], ids=["gqa", "mla"])
def test_triton_kernels_train_a_model(
    attention: AttentionConfig, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    """As far from the exact gradients as PyTorch's own kernels are, or nearer."""
    config, is_forced = replace(CONFIG, attention=attention), dtype == torch.bfloat16
    exact, plain, fused = (
        trained(config, kernels, device, width, is_forced)
        for kernels, width in (
            (PRESETS["reference"], torch.float64),
            (DEFAULT_KERNELS, dtype),
            (PRESETS["fused"], dtype),
        )
    )
    torch.testing.assert_close(fused.loss, plain.loss, rtol=tolerance, atol=0)
    for (name, wanted), *given in zip(exact.named_parameters(), plain.parameters(), fused.parameters(), strict=True):
        of_plain, of_fused = (float((own.grad - wanted.grad).norm() / wanted.grad.norm()) for own in given)
        assert of_fused < tolerance + 1.5 * of_plain, f"{name} differs by {of_fused:.1e}, PyTorch's by {of_plain:.1e}"
    for (name, buffer), other in zip(plain.named_buffers(), fused.buffers(), strict=True):
        torch.testing.assert_close(other, buffer, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
