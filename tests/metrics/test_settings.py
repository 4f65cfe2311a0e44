"""The settings of a run in lists of runs."""

from titan_moe.config import Recipe
from titan_moe.config.train import OptimConfig
from titan_moe.metrics.settings import important_settings


def test_important_settings_are_numbers_and_words() -> None:
    settings = important_settings(Recipe(optim=OptimConfig(lr=0.25)))
    assert settings["optim.lr"] == 0.25 and {type(value) for value in settings.values()} == {int, float, str}
