"""A model under `torch.autocast` on a GPU, in a user's own loop. Autocast has other lists of operations there than on a
CPU: norms compute in fp32."""

import pytest
import torch

from titan_moe.config.kernels import Kernels
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.layers.init import init_weights
from titan_moe.models.transformer import Transformer

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
NUM_TOKENS = 256
GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True)
MLA = AttentionConfig(kind="mla", num_heads=4, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64)


def built(attention: AttentionConfig, backend: str) -> Transformer:
    moe = MoEConfig(num_experts=4, top_k=4, ffn_hidden_size=128)  # all: in bf16 a choice of some would change
    config = ModelConfig(
        vocab_size=512, num_layers=2, hidden_size=256, ffn_hidden_size=256, attention=attention, moe=moe
    )
    model = Transformer(config, kernels=Kernels(attention=backend)).to(DEVICE)
    init_weights(model, seed=0, std=0.05, num_layers=config.num_layers)
    return model


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("attention", [GQA, MLA], ids=["gqa", "mla"])
def test_a_model_under_autocast_is_near_fp32(attention: AttentionConfig, backend: str, is_compiled: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    tokens_BN, labels_BN = torch.randint(512, (2, 2, NUM_TOKENS), device=DEVICE)
    ids_BN = (torch.arange(NUM_TOKENS, device=DEVICE) // 100).int().expand(2, -1).contiguous()
    losses, gradients = [], []
    for model, is_narrow in ((built(attention, "sdpa"), False), (built(attention, backend), True)):
        run = torch.compile(model) if is_compiled and is_narrow else model
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=is_narrow):
            loss = run(tokens_BN, labels_BN, ids_BN) / labels_BN.numel()
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=0)
    assert (gradients[1] - gradients[0]).norm() < 0.03 * gradients[0].norm()
