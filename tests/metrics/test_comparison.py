"""The table of runs, on records written here."""

from typing import Any

import pytest

from titan_moe.config import RecipeError
from titan_moe.metrics.comparison import NOTHING, compare, in_markdown
from titan_moe.metrics.run_records import RunRecords


def record(step: int, scale: float = 1.0, **others: Any) -> dict[str, Any]:
    speed = scale * (100 if step == 30 else 1000 + step)
    return {
        "step": step,
        "loss": 10.0 - step / 10,
        "lr": 1e-3 * min(step, 20),
        "tokens_seen": 64 * step,
        "tokens_per_second_per_gpu": speed,
        "tflops_per_gpu": speed / 10,
        "memory_gib": 10.0 + step,
        **others,
    }


def with_experts(step: int) -> dict[str, Any]:
    return record(
        step,
        scale=2.0,
        expert_load={"layers.0": 2.0, "layers.1": 9.0 if step == 5 else 1.5},
        overload={"avg": 1.0, "max": 1.25, "cum": 3.0},
        capacity={"factor": 1.125 if step < 30 else 1.25, "needed": step / 40},
        rerun_steps=(step > 3) + 2 * (step > 35),
        graph_recordings=1 + (step > 30),
    )


def run(name: str, steps: list[dict[str, Any]], validations: Any = (), **fields: Any) -> RunRecords:
    dotted = {key.replace("__", "."): value for key, value in fields.items()}
    return RunRecords(name, steps, list(validations), dotted)


def columns(runs: list[RunRecords], after: int | None = None) -> list[dict[str, str]]:
    names, *rows = zip(*compare(runs, after), strict=True)
    return [dict(zip(names[1:], row[1:], strict=True)) for row in rows]


def test_table_of_runs() -> None:
    dense = run("dense", [record(step) for step in range(1, 41)])
    moe = run("moe", [with_experts(step) for step in range(1, 41)])
    assert compare([dense, moe])[0] == ["", "dense", "moe"]
    of_dense, of_moe = columns([dense, moe])
    for row in (of_dense, of_moe):
        assert (row["steps"], row["tokens"], row["steps below 90 %"]) == ("40", "2,560", "30")
        assert row["peak GiB"] == "50.0" and row["learning rate, largest; last"] == "0.02; 0.02"
        assert (row["loss"], row["loss at step 20"], row["loss at step 40"]) == ("6.0000", "8.0000", "6.0000")
    names = ("tokens/s/GPU", "of the first", "TFLOP/s", "slowest 5 % below")
    assert [of_dense[name] for name in names] == ["1,030", "1.000", "103", "1,021"], "of steps 21 to 40; 30 is slow"
    assert [of_moe[name] for name in names] == ["2,060", "2.000", "206", "2,042"]
    assert of_moe["capacity factor"] == "1.125 (step 2), 1.25 (step 31)", "records have the factor of the next step"
    assert of_moe["largest need"] == "1.00"
    assert of_moe["taken again; late"] == "3; 2" and of_moe["recordings; late"] == "2; 1"
    assert (of_moe["busiest expert"], of_moe["busiest rank"]) == ("2.00", "1.25"), "step 5 is early"
    assert of_dense["capacity factor"] == of_dense["taken again; late"] == NOTHING
    assert "epochs" not in of_dense and "MFU" not in of_dense, "no run has them"


def test_table_has_validation_losses_by_set() -> None:
    found = [{"step": step, "validation_loss": 9 - step, "validation_loss/code": 1.0 + step} for step in (1, 2)]
    (row,) = columns([run("a", [record(1), record(2)], found)])
    assert row["validation loss"] == "7.0000" and row["validation loss code"] == "3.0000; 2.0000 at 1"
    names = [cells[0] for cells in compare([run("a", [record(20)]), run("b", [record(40)], found)])]
    assert names[3:8] == ["loss", "loss at step 20", "loss at step 40", "validation loss", "validation loss code"]


def test_table_has_the_fields_that_differ() -> None:
    known = {"optim__lr": 0.1, "run__seed": 0, "train__steps": 50}
    runs = [
        run("a", [record(1)], **known, run__folder="a"),
        run("b", [], **{**known, "optim__lr": 0.2}, run__folder="b", data__path="x"),
        run("c", [record(1)]),
    ]
    first, second, without = columns(runs)
    assert (first["steps"], second["steps"], without["steps"]) == ("1 of 50", "none logged", "1")
    assert [row["optim.lr"] for row in (first, second, without)] == ["0.1", "0.2", NOTHING]
    assert first["data.path"] == NOTHING and second["data.path"] == '"x"'
    assert not {"run.seed", "run.folder"} & first.keys()


def test_table_of_a_resumed_run_that_diverged() -> None:
    """Counts begin anew at step 25, and what is not finite is null."""
    steps = [record(step, rerun_steps=2 if step < 25 else step // 30) for step in range(1, 41)]
    steps[-1] |= {"loss": None, "capacity": {"factor": 1.5, "needed": None}}
    (row,) = columns([run("a", steps)])
    assert row["capacity factor"] == "1.5 (step 41)" and "largest need" not in row
    assert (row["taken again; late"], row["loss"], row["loss at step 20"]) == ("3; 1", "not finite", "8.0000")


def test_table_of_records_that_say_little() -> None:
    (row,) = columns([run("old", [{"step": 1, "loss": 2.0}])])
    assert row == {"steps": "1", "loss": "2.0000"}
    assert columns([run("new", [])]) == [{"steps": "none logged"}]


def test_a_run_without_steps_after_a_given_one_is_refused() -> None:
    runs = [run("a", [record(21)]), run("b", [record(20)]), run("c", [])]
    with pytest.raises(RecipeError) as refused:
        compare(runs, after=20)
    assert refused.value.problems == ["b has no record after step 20; --after sets an earlier one"]


def test_markdown_is_aligned() -> None:
    assert in_markdown([["", "a"], ["steps", "1,000"]]) == "|       | a     |\n| ----- | ----- |\n| steps | 1,000 |"
