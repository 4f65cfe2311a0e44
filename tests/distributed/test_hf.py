"""Hugging Face checkpoints under any layout: ranks read and write their parts of the same weights."""

import json
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support.hf_twins import TWINS, ours_for
from support.runs import run_command
from torch import Tensor

from titan_moe.checkpoint import hf_convert, hf_export
from titan_moe.checkpoint.hf import load_hf, save_hf
from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.checkpoint.hf_names.families import FAMILIES
from titan_moe.checkpoint.hf_stream import hf_weights
from titan_moe.checkpoint.hf_weights import weights_of
from titan_moe.config import Recipe
from titan_moe.config.kernels import Kernels
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.perf import CompileConfig, PerfConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.mesh import build_meshes
from titan_moe.parallel.pipeline.model import whole_model
from titan_moe.parameters import full_tensor, fused_rows
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import build_on_meta, build_parts

EVEN = {"hidden_size": 72, "num_attention_heads": 12, "num_key_value_heads": 6, "vocab_size": 62}
NUMBERS = {
    "deepseek_v3": {"num_nextn_predict_layers": 1},
    "gpt_oss": {"num_local_experts": 6},
    "minimax_m2": {"num_local_experts": 6},
    "granitemoeshared": {"num_local_experts": 6},
    "ernie4_5_moe": {"moe_num_experts": 6},
    "phimoe": {"num_local_experts": 6},
    "llama4_text": {"num_local_experts": 6},
}
"""Of experts, six where the family does not say it as Qwen does."""
EP2 = ParallelConfig(ep=2, dispatcher="alltoall")
DEEPSEEK = {"num_key_value_heads": 12, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
LAYOUTS = {
    "qwen3_moe-tied": [ParallelConfig(pp=2, tp=2), replace(EP2, etp=2)],
    "qwen3_moe": [ParallelConfig(pp=2), ParallelConfig(tp=2), EP2, ParallelConfig(cp=2, cp_kind="allgather")],
    "qwen2_moe": [replace(EP2, etp=2)],
    "deepseek_v3": [replace(EP2, tp=2), replace(EP2, pp=2)],
    "gpt_oss": [replace(EP2, tp=2, etp=2), ParallelConfig(pp=2)],
    "minimax_m2": [replace(EP2, tp=2)],
    "granitemoeshared": [replace(EP2, etp=2)],
    "ernie4_5_moe": [ParallelConfig(pp=2, tp=2)],
    "phimoe": [replace(EP2, pp=2), replace(EP2, tp=2)],
    "llama4_text": [replace(EP2, etp=2), replace(EP2, tp=2)],
    "afmoe": [replace(EP2, tp=2), ParallelConfig(pp=2, tp=2)],
    "mellum": [ParallelConfig(pp=2, tp=2)],
}
NUM_TOKENS = 7
PROMPTS = [[5, 7, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [60]]


def go_through(
    source: Path, layouts: list[ParallelConfig], expected: dict[str, Tensor], texts: list[list[int]], out: Path
) -> None:
    """On each rank: load under every layout, compare with the whole tensors, continue prompts, save, and give without a
    file."""
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
        assert continued(whole_model(parts, resolved, meshes)) == texts
        save_hf(parts, out / str(i), max_file_bytes=20_000)
        streamed = list(hf_weights(parts))
        exported = written(out / str(i))
        assert sorted(key for key, _ in streamed) == sorted(exported)
        assert all(torch.equal(tensor, exported[key]) for key, tensor in streamed)
        orders.add(tuple(key for key, _ in streamed))
    assert len(orders) == 1, "of all layouts"
    with pytest.raises(HuggingFaceError, match="config.json cannot be read"):  # on all ranks, or one would wait
        load_hf(parts, source / "absent")


def continued(model: Any) -> list[list[int]]:
    """The prompts and their likeliest tokens."""
    lengths = [len(prompt) for prompt in PROMPTS]
    prompts_BN = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in PROMPTS])
    continued_BN = model.generate(prompts_BN, NUM_TOKENS, lengths_B=torch.tensor(lengths))
    return [row[: length + NUM_TOKENS] for row, length in zip(continued_BN.tolist(), lengths, strict=True)]


def saved(name: str, folder: Path) -> Path:
    """A twin's checkpoint with weights of ours: what transformers makes of an export is in tests/checkpoint."""
    prefix, settings = TWINS[name]
    model_type = name.partition("-")[0]
    heads = EVEN if "deepseek" not in name else EVEN | DEEPSEEK
    changes = heads | NUMBERS.get(name, {"num_experts": 6})
    config = {"model_type": model_type, "architectures": [f"{prefix}ForCausalLM"], **settings, **changes}
    family = FAMILIES[model_type]
    model = Transformer(family.read(config)[0], kernels=Kernels(experts="reference"))
    for tensor in model.state_dict().values():
        torch.nn.init.normal_(tensor)
    for tensor in weights_of(model, None).not_on_disk(family).values():
        tensor.zero_()
    save_hf(model, folder)
    return folder


def written(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.few("qwen3_moe-tied", "deepseek_v3")
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_reads_and_writes_the_same_weights(name: str, ranks, tmp_path: Path) -> None:
    theirs = saved(name, tmp_path / "theirs")
    whole = ours_for(theirs)
    load_hf(whole, theirs)
    ranks(4, go_through, theirs, LAYOUTS[name], whole.state_dict(), continued(whole), tmp_path)
    tensors, config = written(theirs), (theirs / "config.json").read_text()
    for i in range(len(LAYOUTS[name])):
        again = written(tmp_path / str(i))
        assert again.keys() == tensors.keys() and all(torch.equal(again[key], tensors[key]) for key in tensors)
        assert (tmp_path / str(i) / "config.json").read_text() == config


SMALL = {(hf_convert, "MAX_CHUNK_BYTES"): 4_000, (hf_convert, "MAX_FILE_BYTES"): 30_000}
SMALL |= {(hf_export, "MAX_FILE_BYTES"): 30_000}


def convert(port: int, words: list[str]) -> int:
    """Run a command on this rank; files and slices are small."""
    with ExitStack() as patches:
        for (module, name), value in SMALL.items():
            patches.enter_context(mock.patch.object(module, name, value))
        return run_command(port, words)[0]


def test_several_processes_convert_as_one_does(ranks, tmp_path: Path) -> None:
    theirs = saved("deepseek_v3", tmp_path / "theirs")
    folders = tmp_path / "1", tmp_path / "3"
    for num_ranks, folder in zip((1, 3), folders, strict=True):
        commands = ["import", str(theirs), str(folder / "ours")], ["export", str(folder / "ours"), str(folder / "out")]
        for words in commands:
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            assert ranks(num_ranks, convert, port, words) == [0] * num_ranks
    one, three = ({file.relative_to(folder): file for file in folder.rglob("*.*")} for folder in folders)
    assert one.keys() == three.keys() and len(one) > 12
    others = {"ours/.metadata", "ours/manifest.json"}  # DCP's number of the save, and its hash
    for name in one.keys() - set(map(Path, others)):
        assert one[name].read_bytes() == three[name].read_bytes(), name
