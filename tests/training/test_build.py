"""The assembly: models of one's own are checked before they are sharded."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.config import Recipe, RecipeError, load_recipe
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.kernels.choose import ACCUMULATE
from titan_moe.layers.block import Block
from titan_moe.layers.experts import GroupedExperts
from titan_moe.models.transformer import Transformer
from titan_moe.parallel.mesh import Meshes, build_meshes
from titan_moe.parallel.unsharded_experts import use_unsharded_experts
from titan_moe.plan.resolved import Resolved
from titan_moe.training.build import build_on_meta, build_parts

RECIPES = Path(__file__).parents[2] / "recipes"


class Remembering(nn.Module):
    """A norm with a buffer and no `reset_buffers`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((width,), 5.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Restoring(Remembering):
    """The same with `reset_buffers`."""

    def reset_buffers(self) -> None:
        self.table.fill_(5.0)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Meshes]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield build_meshes(resolve(ParallelConfig(), 1), torch.device("cpu"))
    dist.destroy_process_group()


def with_norm(norm: type[nn.Module]) -> type[Transformer]:
    class OwnBlock(Block):
        def __init__(self, config: ModelConfig, *, is_dense: bool, kernels: Kernels) -> None:
            super().__init__(config, is_dense=is_dense, kernels=kernels)
            self.ffn_norm = norm(config.hidden_size)

    return type("Model", (Transformer,), {"block_class": OwnBlock})


class Hidden(nn.Module):
    """A model that keeps its blocks elsewhere."""

    def __init__(self, config: ModelConfig, **options: object) -> None:
        super().__init__()
        self.inner = Transformer(config)


def build(model_class: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    module = ModuleType("own_model")
    module.Model = model_class
    monkeypatch.setitem(sys.modules, "own_model", module)
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16)
    return build_on_meta(Recipe(model=ModelConfig(class_="own_model:Model", hidden_size=16, moe=moe)))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_build_takes_the_recipes_gradient_accumulation(backend: str, one_rank: Meshes) -> None:
    words = ["--run.device=auto", "--precision.compute=bf16", f"--perf.override.gradients={backend}"]
    recipe = load_recipe(Path(__file__).with_name("tiny.toml"), words)
    (model,) = build_parts(build_on_meta(recipe), Resolved(recipe, 1), one_rank, torch.device("cpu"), ExpertCapacity())
    layers = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    assert layers and all(experts.transforms["local"].accumulate is ACCUMULATE[backend] for experts in layers)


def test_build_refuses_a_buffer_without_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError) as refused:
        build(with_norm(Remembering), monkeypatch)
    (problem,) = refused.value.problems
    assert 'model.class = "own_model:Model": Remembering has a buffer `table`' in problem
    assert "let reset_buffers() fill" in problem


def test_build_accepts_a_buffer_with_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(buffer.is_meta for buffer in build(with_norm(Restoring), monkeypatch).buffers())


@pytest.mark.parametrize(
    ("model_class", "said"),
    [
        (3.14, "cannot be called as Class"),
        (Restoring, r"cannot be called as Class\(model_config, kernels=..., loss_chunk_tokens=...\): "),
        (lambda config, **options: config, "makes no nn.Module"),
        (Hidden, "has no `forward`"),
    ],
)
def test_build_refuses_a_class_that_is_no_model(model_class: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=f'model.class = "own_model:Model":? {said}'):
        build(model_class, monkeypatch)


def test_build_error_names_a_failed_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text("import not_installed_here")
    monkeypatch.syspath_prepend(tmp_path)
    for path, way_out in (("broken_model", "install not_installed_here"), ("nowhere.at_all", "write it as")):
        with pytest.raises(RecipeError, match=f"cannot be imported: .*; {way_out}"):
            build_on_meta(Recipe(model=ModelConfig(class_=f"{path}:Model")))


def test_build_refuses_a_model_without_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match='model.class = "own_model:Model": has no `layers`'):
        build(Hidden, monkeypatch)


def test_build_does_not_delay_weight_grads_of_other_experts(one_rank: Meshes) -> None:
    experts = GroupedExperts(2, 8, 8)
    use_unsharded_experts(experts, one_rank.expert_fsdp, None, keeps=False, delay_weight_grads_of_experts=True)
    assert experts.delayed_weights() is None
