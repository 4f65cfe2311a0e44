"""The table of a model's modules: what only some layouts show, and a module that is added to it."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.config.modules import Module, Split, default_modules, modules_of
from titan_moe.config.parallel import ParallelConfig
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.count import count_parameters, training_flops_per_token
from titan_moe.plan.pipeline.stages import stages_of
from titan_moe.plan.resolved import Resolved

TINY = Path(__file__).parents[1] / "training" / "tiny.toml"
MLA = AttentionConfig(
    kind="mla", num_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=0
)


@pytest.mark.parametrize(
    ("parallel", "own_outputs", "latents", "rebuilt"),
    [
        (ParallelConfig(), 4 * (8 + 6), 1, 1),
        (ParallelConfig(tp=2), 2 * (8 + 6), 2, 1),
        (ParallelConfig(cp=2), 2 * (8 + 6), 2, 1),
        (ParallelConfig(cp=2, tp=2), 8 + 6, 4, 1),
        (ParallelConfig(cp=2, cp_kind="allgather"), 4 * (8 + 6), 2, 2),
    ],
    ids=["alone", "tp", "ulysses", "ulysses-tp", "allgather"],
)
def test_kv_up_reads_the_latents_of_all_ranks(
    parallel: ParallelConfig, own_outputs: int, latents: int, rebuilt: int
) -> None:
    """With `ulysses` a rank rebuilds its heads of all tokens, with `allgather` all heads of them."""
    modules = modules_of(ModelConfig(attention=MLA), parallel)
    (kv_up,) = (module for module in modules if module.path == "attention.kv_up")
    assert kv_up.widths == (16, 4 * (8 + 6)) and kv_up.own_widths == (16, own_outputs)
    assert kv_up.kept == kv_up.gradients == latents * 16 + rebuilt * 4 * (8 + 6)
    assert kv_up.kept_as_codes == -latents * 16 / 2, "codes instead of what nothing else reads"


def with_sinks(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Module]:
    """A module of one's own in the last two layers: a parameter a head, and more work than a block has."""
    yield from default_modules(model, parallel)
    sizes: dict[str, Any] = {"parameters": 4, "own_parameters": 4 / parallel.tp, "kept": 10_000, "gradients": 0}
    layers = range(model.num_layers)[-2:]
    yield Module("attention.sinks", "attention", layers, multiply_adds=1_000_000, **sizes)


def with_splits(model: ModelConfig, parallel: ParallelConfig) -> Iterator[Module]:
    """Modules of one's own that say what tp divides, what FSDP divides beside it, and heads."""
    yield from default_modules(model, parallel)
    layers = range(model.num_layers)
    width, columns = Split("ffn_hidden_size", 5), Split("moe.latent_size", 7)
    yield Module("lens", "dense", layers, tp_split=width, fsdp_split=columns)
    yield Module("sinks", "attention", layers, tp_split=Split("attention.num_sink_heads", 9))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> str:
    mine = SimpleNamespace(table=with_sinks, splits=with_splits, no_rows=lambda *_: [1])
    monkeypatch.setitem(sys.modules, "mine", mine)
    return "mine:table"


def recipe(*overrides: str) -> Recipe:
    words = ["--model.class=mine:Model", "--model.num_layers=8", "--precision.compute=bf16", "--run.device=cuda"]
    return load_recipe(TINY, [*words, *overrides])


def test_an_added_module_is_in_all_counts(table: str) -> None:
    plain, own = recipe(), recipe(f"--model.table={table}")
    assert check_rules(own, 1) == []
    assert count_parameters(own.model).total - count_parameters(plain.model).total == 2 * 4
    more = training_flops_per_token(own.model, 64) - training_flops_per_token(plain.model, 64)
    assert more == 2 * 6 * 1_000_000
    tokens = own.train.micro_batch_sequences * own.train.seq_len_tokens
    element = {"bf16": 2, "fp32": 4, "fp64": 8}[own.precision.compute]
    more = Resolved(own, 1).peak_bytes(1.0) - Resolved(plain, 1).peak_bytes(1.0)
    assert more >= 2 * 10_000 * tokens * element
    sizes = [
        [sum(name.startswith("layers.") for name in stage) for stage in stages_of(it)]
        for it in (replace(each, parallel=ParallelConfig(pp=2)) for each in (plain, own))
    ]
    assert sizes[0][0] < sizes[1][0] == 7, "the last two layers take the most time"


def test_an_added_module_is_split_by_the_rules_of_tp_and_cp(table: str) -> None:
    def problems(*overrides: str) -> list[str]:
        run = recipe("--model.table=mine:splits", "--train.global_batch_sequences=8", *overrides)
        return [problem for problem in check_rules(run, 4) if "model.class" not in problem]

    assert problems() == []
    assert problems("--parallel.tp=2") == [
        "parallel.tp = 2 does not divide model.attention.num_sink_heads = 9 (each tp rank computes whole heads, which "
        "share a key/value head with the same number of others)",
        "parallel.tp = 2 does not divide model.ffn_hidden_size = 5 (each tp rank has an equal part of this width)",
        "dp_shard = 2 does not divide model.moe.latent_size = 7, which parallel.tp = 2 requires (FSDP shards the "
        "columns of weights whose rows tp splits, in equal parts, over dp_shard * cp ranks)",
    ]
    (of_cp,) = problems("--parallel.cp=2")
    assert of_cp.startswith("parallel.cp = 2 does not divide model.attention.num_sink_heads = 9 (with ulysses")


def test_check_counts_by_the_table_of_a_class(table: str) -> None:
    assert "those of the default class" in describe(recipe(), 1)
    page = describe(recipe(f"--model.table={table}"), 1)
    assert "default class" not in page and "active a token" in page and "GFLOP" in page


def test_a_table_that_describes_nothing_is_refused(table: str) -> None:
    (problem,) = check_rules(recipe(f"--model.table={table}", f"--model.class={ModelConfig.class_}"), 1)
    assert f'model.table = "{table}" describes a model.class of your own' in problem
    for path, reason in {
        "mine:lost": "cannot be imported",
        "lost": "cannot be imported",
        "mine:no_rows": "rows",
    }.items():
        with pytest.raises(RecipeError, match=f'model.table = "{path}" .*{reason}'):
            describe(recipe(f"--model.table={path}"), 1)
