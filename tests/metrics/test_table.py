"""The table of metrics: what records have and the console says, in which order."""

from dataclasses import replace

import torch

from titan_moe.config import Recipe
from titan_moe.config.mixture import MixtureSource
from titan_moe.config.model import ModelConfig
from titan_moe.config.mtp import MTPConfig
from titan_moe.metrics.table import METRICS, StepNumbers, finish_mtp, measured, mtp_metrics, record_of, words_of

KNOWN = {metric.name: 1.0 for metric in METRICS} | {
    "expert_load": {"a": 1.5},
    "idle_experts": {"sum": 2, "max": 2},
    "overload": {"max": 1.25},
    "rerun_share": 0.5,
    "forced_load": "skewed",
} | dict.fromkeys(("skipped_steps", "spikes", "bad_rows", "rerun_steps", "clipped_heads"), 1)  # fmt: skip


def test_names_are_given_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) and all(metric.after in ("", *names) for metric in METRICS)


def test_records_have_what_is_known_of_a_recipe() -> None:
    recipe, missing = Recipe(), {"graph_recordings", "expert_clones", "bad_rows", "forced_load", "epoch"}
    missing |= {"router_entropy", "bias_spread", "dropped_share", "max_attention_logit", "clipped_heads"}
    recorded = [metric.name for metric in METRICS if metric.is_recorded]
    assert list(record_of(7, KNOWN, recipe)) == ["step", *(name for name in recorded if name not in missing)]
    assert record_of(7, {"mfu": None, "other": 1}, recipe) == {"step": 7, "mfu": None}
    skipping = replace(recipe, data=replace(recipe.data, bad_rows="skip"))
    assert "bad_rows" in record_of(7, KNOWN, skipping)
    assert "epoch" in record_of(7, KNOWN, replace(recipe, data=replace(recipe.data, source="text")))
    mixed = replace(recipe.data, source="mixture", mixture=(MixtureSource("a.txt"), MixtureSource("b.txt")))
    epochs = {"epoch": None, "epoch/a": 0.5, "epoch/b": 1.5}
    assert record_of(7, epochs, replace(recipe, data=mixed)) == {"step": 7, "epoch/a": 0.5, "epoch/b": 1.5}
    assert [metric.name for metric in measured(recipe)] == ["loss", "aux_loss", "has_overflowed", "needed_factor"]


def test_losses_of_multi_token_prediction_are_means_over_their_own_labels() -> None:
    recipe = Recipe(model=ModelConfig(mtp=MTPConfig(2)))
    step = StepNumbers(*torch.ones(4), None, 1, {}, mtp_K2=torch.tensor([[6.0, 2.0], [1.0, 0.0]]))
    metrics = {metric.name: metric.measure(step) for metric in mtp_metrics(recipe)}
    finish_mtp(metrics)
    assert {name: value.item() for name, value in metrics.items()} == {"mtp_loss/1": 3.0, "mtp_loss/2": 0.0}
    assert {metric.name for metric in measured(recipe)} > {metric.name for metric in mtp_metrics(recipe)}
    assert mtp_metrics(Recipe()) == []
    record = record_of(7, {"lr": 1e-3, "mtp_loss/2": 2.5, "mtp_loss/1": 2.0, "loss": 1.0}, recipe)
    assert list(record) == ["step", "loss", "mtp_loss/1", "mtp_loss/2", "lr"]
    assert words_of(record, "GPU") == ["loss 1.0000", "mtp 2.0000, 2.5000", "lr 1.00e-03"]


def test_words_are_in_one_order() -> None:
    assert words_of(KNOWN, "GPU") == [
        "loss 1.0000", "aux 1.00e+00", "norm 1.000", "lr 1.00e+00", "epoch 1.00", "1 tokens/s/GPU", "1 TFLOP/s",
        "MFU 100.0%", "1.00 GiB", "1 ms", "expert load 1.50", "2 idle experts",
        "dropped 100.00%", "max logit 1.0", "1 head clipped", "overload 1.25",
        "SKIPPED 1 step, where gradients were not finite", "SKIPPED 1 spike", "SKIPPED 1 bad row",
        "1 step rerun (50.0%)", "FORCED LOAD: SKEWED", "validation loss 1.0000",
    ]  # fmt: skip
