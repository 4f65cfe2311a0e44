"""Layouts of pipelines: the language of Megatron's --pipeline-model-parallel-layout."""

import pytest

from titan_moe.config.pipeline_layout import parse_layout


def letters(stages: tuple[tuple[str, ...], ...], num_layers: int) -> str:
    """A layout written out, from the names of modules. Blocks behind the layers are of multi-token prediction."""
    of_module = {"embed": "E", "norm": "", "head": "L"} | {f"layers.{i}": "m" for i in range(num_layers, 99)}
    return "|".join("".join(of_module.get(name, "t") for name in stage) for stage in stages)


@pytest.mark.parametrize(
    ("layout", "written_out"),
    [
        ("EtL", "EtL"),
        ("Et|tL", "Et|tL"),
        ("Et*3|(tt|)*2tL", "Ettt|tt|tt|tL"),
        ("Et*3|(tt|)*29L", "Ettt|" + 29 * "tt|" + "L"),  # of DeepSeek-V3 in Megatron's tests, without m
        ("E|t|L", "E|t|L"),
        ("(E)(t)*2 | , t*2, ||L", "Ett|tt||L"),
        ("E((t|)*2t|)*2L", "Et|t|t|t|t|t|L"),
        ("Et|*3L", "Et|||L"),
        ("Ett|tm*2L", "Ett|tmmL"),
        ("Et*3|(tt|)*2mL", "Ettt|tt|tt|mL"),
    ],
)
def test_layout_is_written_out(layout: str, written_out: str) -> None:
    num_layers, num_mtp = written_out.count("t"), written_out.count("m")
    stages = parse_layout(layout, num_layers, written_out.count("|") + 1, num_mtp)
    assert letters(stages, num_layers) == written_out
    names = [name for stage in stages for name in stage]
    assert names == ["embed", *(f"layers.{i}" for i in range(num_layers + num_mtp)), "norm", "head"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("", "E (the embedding) is needed once, and there is none"),
        ("Ettxt|L", '"x" at position 4 is unknown there; expected E, t, m, L'),
        ("Et(t|tL", '"(" at position 3 is not closed; expected ")"'),
        ("Ett)|tL", '")" at position 4 has no "(" before it'),
        ("*2EtttL", '"*" at position 1 is unknown there; expected a letter or ( before it'),
        ("Et**2tL", '"*" at position 3 needs a number behind it, 1 or more'),
        ("Et*0tL", '"*" at position 3 needs a number'),
        ("Et3L", '"3" at position 3 is unknown'),
        ("tEt|tL", '"t" at position 1 is first; expected E'),
        ("Ett|Lt", '"t" at position 6 is last; expected L'),
        ("|Ett|ttL|", '"|" at position 1 is first; expected E'),
        ("(|)*2Ett|ttL", '"|" at position 2 is first; expected E'),
        ("Ett|ttL,|", '"|" at position 9 is last; expected L'),
        ("Et|EtL", "E (the embedding) is needed once, and it is at positions 1, 4"),
        ("Et|tL*2", "L (the loss) is needed once, and it is at positions 5, 5"),
        ("Ettt", "L (the loss) is needed once, and there is none"),
        ("Ett|ttmmL", "it has 2 blocks of multi-token prediction (m), but the model has 0"),
        ("Ett|tL", "it has 3 layers (t), but model.num_layers = 4"),
        ("Ettt|t|L", "it has 3 stages, separated by |, but parallel.pp * vpp = 2"),
        ("E(((t*9999)*9999)*9999)*9999L", "the repeat of position 4 makes more than 100,000 letters"),
        ("Et*99999999999999999999L", '"*" at position 3 needs a number'),
    ],
)
def test_layout_errors_say_where_and_what_was_expected(layout: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_layout(layout, 4, 2)
    assert message in str(caught.value)


@pytest.mark.parametrize("layout", ["Ett|tmtL", "Etttm|L", "Ett|mttL"])
def test_blocks_of_mtp_are_on_the_stage_of_the_loss(layout: str) -> None:
    with pytest.raises(ValueError, match=r'"m" at position . must be right before L, .*; write "\|mL" for a stage of'):
        parse_layout(layout, layout.count("t"), 2, 1)
    with pytest.raises(ValueError, match=r'it has 0 blocks of multi-token .*; write "mmL" at its end'):
        parse_layout("Et|tL", 2, 2, 2)
