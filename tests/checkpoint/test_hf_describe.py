"""What an export at the end of a run would refuse is said before it starts."""

import json
from pathlib import Path

import pytest

from titan_moe import check
from titan_moe.checkpoint.hf_describe import export_problems
from titan_moe.checkpoint.hf_names.families import FAMILIES
from titan_moe.config import Recipe, RecipeError
from titan_moe.config.model import AttentionConfig, ModelConfig, MoEConfig
from titan_moe.config.train import CheckpointConfig, RunConfig

RECIPES = Path(__file__).parents[2] / "recipes"
EXPORTED = ["--checkpoint.export_hf_at_end=true"]
BIASED = [*EXPORTED, "--model.moe.bias_update_speed=1e-3"]


def problems_of(recipe: str, words: list[str]) -> str:
    with pytest.raises(RecipeError) as refused:
        check(RECIPES / recipe, words)
    return "\n".join(refused.value.problems)


def test_a_bias_that_the_family_has_no_place_for_is_refused_before_the_run() -> None:
    said = problems_of("qwen3_30b_a3b.toml", BIASED)
    assert "checkpoint.export_hf_at_end = true cannot be done: model.moe.bias_update_speed = 0.001 moves biases" in said
    assert "qwen3_moe has no place for; set it to 0" in said and "model.moe.aux_loss_coef" in said
    check(RECIPES / "qwen3_30b_a3b.toml", EXPORTED)
    check(RECIPES / "deepseek_v3.toml", BIASED)


def test_a_model_that_no_family_computes_is_refused_before_the_run() -> None:
    assert "no family of Hugging Face computes" in problems_of(
        "qwen3_30b_a3b.toml", [*EXPORTED, "--model.embedding_multiplier=2.0"]
    )


def test_the_family_is_that_of_the_checkpoint_that_the_run_begins_with(tmp_path: Path) -> None:
    moe = MoEConfig(4, top_k=2, ffn_hidden_size=32, bias_update_speed=1e-3)
    model = ModelConfig(num_layers=2, hidden_size=64, attention=AttentionConfig(num_heads=4, num_kv_heads=4), moe=moe)
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["granitemoe"].write(model)))
    for source, family in (("", "mixtral"), (f"hf:{tmp_path}", "granitemoe")):
        checkpoint = CheckpointConfig(load_from=source, export_hf_at_end=True)
        run = RunConfig(folder=str(tmp_path / "run"))
        (problem,) = export_problems(Recipe(model=model, checkpoint=checkpoint, run=run))
        assert f"biases that {family} has no place for" in problem
    absent = CheckpointConfig(load_from=f"hf:{tmp_path}/absent", export_hf_at_end=True)
    assert not list(export_problems(Recipe(model=model, checkpoint=absent)))


def test_an_adapter_that_has_no_files_is_refused_before_the_run() -> None:
    words = ["--checkpoint.export_adapter_at_end=true", "--model.adapter.rank=16"]
    experts, attention = ['--model.adapter.targets=["experts"]'], ['--model.adapter.targets=["attention"]']
    said = problems_of("gpt_oss_20b.toml", [*words, *experts])
    assert "export_adapter_at_end = true cannot be done: adapters of its experts (mlp.experts.gate_up_proj" in said
    check(RECIPES / "gpt_oss_20b.toml", [*words, *attention])
    check(RECIPES / "qwen3_30b_a3b_lora.toml", words[:1])
    assert "export_adapter_at_end = true cannot be done: no family of Hugging Face computes" in problems_of(
        "qwen3_30b_a3b.toml", [*words, *attention, "--model.embedding_multiplier=2.0"]
    )
