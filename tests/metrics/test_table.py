"""The table of metrics: what records have and the console says, in which order."""

from dataclasses import replace

from titan_moe.config import Recipe
from titan_moe.config.mixture import MixtureSource
from titan_moe.metrics.table import METRICS, measured, record_of, words_of

KNOWN = {metric.name: 1.0 for metric in METRICS} | {
    "expert_load": {"a": 1.5},
    "idle_experts": {"sum": 2, "max": 2},
    "overload": {"max": 1.25},
    "rerun_share": 0.5,
    "forced_load": "skewed",
} | dict.fromkeys(("skipped_steps", "spikes", "bad_rows", "rerun_steps"), 1)  # fmt: skip


def test_names_are_given_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) and all(metric.after in ("", *names) for metric in METRICS)


def test_records_have_what_is_known_of_a_recipe() -> None:
    recipe, missing = Recipe(), {"graph_recordings", "expert_clones", "bad_rows", "forced_load", "epoch"}
    missing |= {"router_entropy", "bias_spread", "dropped_share"}
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


def test_words_are_in_one_order() -> None:
    assert words_of(KNOWN, "GPU") == [
        "loss 1.0000", "aux 1.00e+00", "norm 1.000", "lr 1.00e+00", "epoch 1.00", "1 tokens/s/GPU", "1 TFLOP/s",
        "MFU 100.0%", "1.00 GiB", "1 ms", "expert load 1.50", "2 idle experts",
        "dropped 100.00%", "overload 1.25",
        "SKIPPED 1 step, where gradients were not finite", "SKIPPED 1 spike", "SKIPPED 1 bad row",
        "1 step rerun (50.0%)", "FORCED LOAD: SKEWED", "validation loss 1.0000",
    ]  # fmt: skip
