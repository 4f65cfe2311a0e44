"""Hugging Face checkpoints under any layout: ranks read and write their parts of the same weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from titan_moe.checkpoint.hf import load_hf, save_hf
from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.checkpoint.hf_names.families import FAMILIES
from titan_moe.checkpoint.hf_stream import hf_weights
from titan_moe.config import Recipe
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.parallel.mesh import build_meshes
from titan_moe.parameters import full_tensor, fused_rows
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import build_on_meta, build_parts

EVEN = {"hidden_size": 72, "num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": 62}
NUMBERS = {
    "deepseek_v3": {},
    "gpt_oss": {"num_local_experts": 6},
    "granitemoeshared": {"num_local_experts": 6},
    "ernie4_5_moe": {"moe_num_experts": 6},
}
"""Of experts, six where the family does not say it as Qwen does."""
LAYOUTS = {
    "qwen3_moe": [ParallelConfig(ep=2, dispatcher="alltoall"), ParallelConfig(tp=2), ParallelConfig(pp=2)],
    "qwen3_moe-tied": [ParallelConfig(pp=2), ParallelConfig(tp=2)],
    "gpt_oss": [ParallelConfig(tp=2, ep=2, etp=2, dispatcher="alltoall"), ParallelConfig(pp=2)],
    "qwen2_moe": [ParallelConfig(ep=2, etp=2, dispatcher="alltoall")],
    "minimax_m2": [ParallelConfig(tp=2, ep=2, dispatcher="alltoall")],
    "granitemoeshared": [ParallelConfig(ep=2, etp=2, dispatcher="alltoall")],
    "ernie4_5_moe": [ParallelConfig(pp=2, tp=2)],
    "deepseek_v3": [
        ParallelConfig(tp=2, ep=2, dispatcher="alltoall"),
        ParallelConfig(pp=2, ep=2, dispatcher="alltoall"),
    ],
}


def go_through(source: Path, layouts: list[ParallelConfig], expected: dict[str, Tensor], out: Path) -> None:
    """On each rank: load under every layout, compare with the whole tensors, save, and give without a file."""
    config = json.loads((source / "config.json").read_text())
    model = FAMILIES[config["model_type"]].read(config)[0]
    orders = set()
    for i, parallel in enumerate(layouts):
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
        load_hf(parts, source)
        for part in parts:
            rows = fused_rows(part)
            for name, tensor in part.state_dict().items():
                assert torch.equal(full_tensor(tensor, rows.get(name, ())), expected[name]), name
        save_hf(parts, out / str(i), max_file_bytes=20_000)
        streamed = list(hf_weights(parts))
        written = {key: each for file in (out / str(i)).glob("*.safetensors") for key, each in load_file(file).items()}
        assert sorted(key for key, _ in streamed) == sorted(written)
        assert all(torch.equal(tensor, written[key]) for key, tensor in streamed)
        orders.add(tuple(key for key, _ in streamed))
    assert len(orders) == 1, "of all layouts"
    with pytest.raises(HuggingFaceError, match="config.json cannot be read"):  # on all ranks, or one would wait
        load_hf(parts, source / "absent")


@pytest.mark.few("qwen3_moe", "qwen3_moe-tied", "qwen2_moe", "deepseek_v3")
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_reads_and_writes_the_same_weights(name: str, ranks, tmp_path: Path) -> None:
    heads = EVEN if "deepseek" not in name else EVEN | {"num_key_value_heads": 12}
    changes = heads | NUMBERS.get(name, {"num_experts": 6})
    from support import hf_twins  # not on ranks: to import transformers takes seconds

    theirs = hf_twins.twin(name, **changes)
    theirs.save_pretrained(tmp_path / "theirs")
    whole = hf_twins.ours_for(tmp_path / "theirs")
    load_hf(whole, tmp_path / "theirs")
    ranks(4, go_through, tmp_path / "theirs", LAYOUTS[name], whole.state_dict(), tmp_path)
    for i in range(len(LAYOUTS[name])):
        hf_twins.assert_equal_in_transformers(tmp_path / str(i), theirs)
