"""Sections of charts."""

from titan_moe.metrics.sections import SECTION_OF, charted
from titan_moe.metrics.table import METRICS


def test_every_recorded_number_but_losses_has_a_section() -> None:
    names = {metric.name for metric in METRICS if metric.is_recorded}
    assert names - SECTION_OF.keys() == {"loss", "validation_loss", "forced_load"}, "the last one is a word"
    assert names > SECTION_OF.keys() and min(SECTION_OF.values()) > "loss", "the section of the loss is the first"


def test_charts_of_a_record() -> None:
    record = {"step": 3, "loss": 1.5, "overload": {"max": 2.0, "cum": None}, "mfu": None, "forced_load": "skewed"}
    record |= {"validation_loss/code": 1, "is_new": True}
    assert charted(record) == {"loss": 1.5, "moe/overload/max": 2.0, "validation_loss/code": 1}
