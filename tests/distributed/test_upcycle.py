"""A dense checkpoint begins a MoE model under any layout: with the weights that one rank loads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.hf_twins import DENSE_TWINS
from torch import Tensor

from titan_moe.checkpoint.hf import load_hf
from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.checkpoint.hf_names.dense import DENSE
from titan_moe.checkpoint.hf_weights import pieces_of
from titan_moe.config import Recipe
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.upcycle import UpcycleConfig
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.mesh import build_meshes
from titan_moe.parameters import full_tensor, fused_rows
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import build_on_meta, build_parts

EVEN = {"hidden_size": 72, "num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": 62, "head_dim": 6}
MOE = MoEConfig(12, 6, 12, shared_ffn_hidden_size=6)
HOW = UpcycleConfig(3, noise_std=0.1)
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")
LAYOUTS = [replace(EP2, tp=2), replace(EP2, pp=2), replace(EP2, etp=2), ParallelConfig()]


def load_under(layouts: list[ParallelConfig], model: ModelConfig, source: Path, expected: dict[str, Tensor]) -> None:
    """On each rank: load under every layout, and compare with the whole tensors."""
    for parallel in layouts:
        recipe = Recipe(
            model=model,
            parallel=parallel,
            precision=PrecisionConfig("fp32", "fp32", "fp32"),
            perf=PerfConfig(kernels="reference"),
            compile=CompileConfig("off"),
        )
        meshes = build_meshes(resolve(parallel, torch.distributed.get_world_size()), torch.device("cpu"))
        resolved = Resolved(recipe, meshes.sizes.world)
        parts = build_parts(build_on_meta(recipe), resolved, meshes, torch.device("cpu"), ExpertCapacity())
        load_hf(parts, source, upcycle=HOW, seed=5)
        for part in parts:
            rows = fused_rows(part)
            for name, tensor in part.state_dict().items():
                assert torch.equal(full_tensor(tensor, rows.get(name, ())), expected[name]), name
    with pytest.raises(HuggingFaceError, match="42 hidden units"):  # on all ranks, or one would wait
        load_hf(parts, source, upcycle=replace(HOW, granularity=2))


@pytest.mark.few("qwen3")
@pytest.mark.parametrize("name", DENSE_TWINS)
def test_any_layout_begins_with_the_same_weights(name: str, ranks, tmp_path: Path) -> None:
    prefix, settings = DENSE_TWINS[name]
    config = {"model_type": name, "architectures": [f"{prefix}ForCausalLM"], **settings, **EVEN}
    (tmp_path / "config.json").write_text(json.dumps(config))
    dense = DENSE[name].read(config)[0]
    shapes = {key: tuple(tensor.shape) for key, tensor in Transformer(dense).state_dict().items()}
    on_disk = {piece.name: torch.randn(piece.shape) for piece in pieces_of(DENSE[name], dense, shapes)}
    save_file(on_disk, tmp_path / "model.safetensors")
    model = replace(dense, moe=MOE, moe_every=2, num_layers=3)
    whole = Transformer(model, kernels=Kernels(experts="reference"))
    for tensor in whole.state_dict().values():
        tensor.fill_(torch.nan)
    load_hf(whole, tmp_path, upcycle=HOW, seed=5)
    assert all(tensor.isfinite().all() for tensor in whole.state_dict().values())
    ranks(4, load_under, LAYOUTS, model, tmp_path, whole.state_dict())
