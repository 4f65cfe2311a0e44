"""Multi-token prediction is Megatron Core's: its own blocks, rolls and loss scaler, around our decoder layers.

It runs on a CPU where megatron-core is installed (`pip install --no-deps megatron-core`), which no other test needs.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.hf_twins import TWINS
from torch import Tensor, nn

from titan_moe.checkpoint.hf_names.families import FAMILIES
from titan_moe.config.kernels import Kernels
from titan_moe.config.mtp import MTPConfig
from titan_moe.layers.init import init_weights
from titan_moe.models.transformer import Transformer

prediction = pytest.importorskip("megatron.core.transformer.multi_token_prediction", exc_type=ImportError)
megatron = pytest.importorskip("megatron.core")

SEQUENCES, TOKENS = 2, 13


@pytest.fixture
def alone() -> Iterator[None]:
    """Megatron Core's groups of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    megatron.parallel_state.initialize_model_parallel()
    yield
    megatron.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def ours() -> Transformer:
    """DeepSeek-V3's tiny twin, with two depths."""
    settings = TWINS["deepseek_v3"][1] | {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
    config = FAMILIES["deepseek_v3"].read(settings | {"num_nextn_predict_layers": 2})[0]
    config = replace(config, mtp=MTPConfig(2, loss_weight=0.3))
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(config, kernels=Kernels(experts="reference"))
    finally:
        torch.set_default_dtype(torch.float32)
    init_weights(model, seed=0, std=0.2, num_layers=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.2)
    return model


def theirs_for(model: Transformer, contexts: Any) -> nn.Module:
    """Their blocks of multi-token prediction with our weights, each around one of our decoder layers."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    blocks = iter(model.mtp_blocks.items())

    class Layer(nn.Module):
        def __init__(self, **_: Any) -> None:
            super().__init__()
            self.name, block = next(blocks)
            self.of_block = [block]  # no child: its parameters are ours

        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            (block,) = self.of_block
            h_BND, normed_BND = block.front(hidden_states.transpose(0, 1), contexts[self.name])
            return block.add(h_BND, block.feed_forward(normed_BND), None).transpose(0, 1), None

    c = model.config
    config = TransformerConfig(
        num_layers=c.num_layers,
        hidden_size=c.hidden_size,
        num_attention_heads=1,
        mtp_num_layers=c.mtp.num_depths,
        mtp_loss_scaling_factor=c.mtp.loss_weight,
        normalization="RMSNorm",
        layernorm_epsilon=c.norm_eps,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    attention = SimpleNamespace(params={"attn_mask_type": AttnMaskType.causal})
    layer = ModuleSpec(module=Layer, submodules=SimpleNamespace(self_attention=attention))
    of_depth = prediction.get_mtp_layer_spec_for_backend(layer, LocalSpecProvider())
    spec = prediction.MultiTokenPredictionBlockSubmodules(layer_specs=[of_depth] * c.mtp.num_depths)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    block = prediction.MultiTokenPredictionBlock(config=config, spec=spec, pg_collection=groups).double()
    names = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "eh_proj", "final_layernorm": "final_norm"}
    with torch.no_grad():
        for theirs, own in zip(block.layers, model.mtp_blocks.values(), strict=True):
            for name, of_ours in names.items():
                getattr(theirs, name).weight.copy_(getattr(own, of_ours).weight)
    return block


def test_mtp_is_that_of_megatron(alone: None, ours: Transformer) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens_BM = torch.randint(ours.config.vocab_size, (SEQUENCES, TOKENS + 1), generator=generator)
    tokens_BN, labels_BN = tokens_BM[:, :-1], tokens_BM[:, 1:]
    contexts = ours.contexts(tokens_BN, None)
    block = theirs_for(ours, contexts)
    mtp = ours.config.mtp

    x_BND = ours.embed(tokens_BN)
    for name, layer in list(ours.layers.items())[: ours.config.num_layers]:
        x_BND = layer(x_BND, contexts[name])
    h_NBD = ours.norm(x_BND).transpose(0, 1)
    states = block(
        input_ids=tokens_BN,
        position_ids=torch.arange(TOKENS).expand(SEQUENCES, -1),
        hidden_states=h_NBD,
        attention_mask=None,
        embedding=lambda input_ids, position_ids: ours.embed(input_ids).transpose(0, 1),
    ).chunk(1 + mtp.num_depths)
    main_NBD, labels, mask = states[0], labels_BN.clone(), torch.ones(SEQUENCES, TOKENS, dtype=torch.float64)
    losses = []
    prediction.MTPLossAutoScaler.set_loss_scale(torch.ones(1, dtype=torch.float64))
    for state_NBD in states[1:]:
        labels, mask = (prediction.roll_tensor(x, shifts=-1, dims=-1)[0] for x in (labels, mask))
        logits_TV = ours.head.forward(state_NBD.transpose(0, 1)).flatten(0, 1)
        loss = F.cross_entropy(logits_TV, labels.flatten(), reduction="none") * mask.flatten()
        losses.append(loss.sum().item())
        main_NBD = prediction.MTPLossAutoScaler.apply(main_NBD, mtp.loss_weight / mtp.num_depths * loss)
    expected = ours.head(main_NBD.transpose(0, 1), labels_BN)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.grad is not None}
    names = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "eh_proj", "final_layernorm": "final_norm"}
    for name, theirs in zip(ours.mtp_blocks, block.layers, strict=True):
        for their_name, own in names.items():
            gradients[f"layers.{name}.{own}.weight"] = getattr(theirs, their_name).weight.grad
    ours.zero_grad()

    loss = ours(tokens_BN, labels_BN)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    sums = [block.losses.sums_K2[0, 0].item() for block in ours.mtp_blocks.values()]
    assert sums == pytest.approx(losses, rel=1e-12)
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-11, msg=name)
