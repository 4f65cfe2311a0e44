"""The formats of `[precision]`, by part and by GEMM."""

from dataclasses import replace
from pathlib import Path

import pytest

from titan_moe.config import Recipe, check_rules, load_recipe
from titan_moe.config.formats import FORMAT_FACTS, GemmFormats
from titan_moe.config.gemms import gemm_modules
from titan_moe.config.precision import PrecisionConfig
from titan_moe.plan.choice.formats import FormatChoice, keep_slower_in_compute

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def test_precision_parts_override_the_preset() -> None:
    p = PrecisionConfig(format="fp8_rowwise", experts="mxfp8")
    assert (p.format_of("experts"), p.format_of("linears")) == ("mxfp8", "fp8_rowwise")
    assert p.formats == ["fp8_rowwise", "mxfp8"]
    p = PrecisionConfig(format="fp8_rowwise", experts="compute")
    assert p.gemm_formats("experts") == GemmFormats() and p.formats == ["fp8_rowwise"]
    assert PrecisionConfig().formats == []


def test_precision_keeps_single_gemms_in_compute() -> None:
    p = PrecisionConfig(linears="fp8_rowwise", wgrad="compute")
    assert p.gemm_formats("linears") == GemmFormats("fp8_rowwise", "fp8_rowwise", "compute")
    assert p.gemm_formats("experts") == GemmFormats()


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        (GemmFormats(), "compute"),
        (GemmFormats("mxfp8", "mxfp8", "mxfp8"), "mxfp8"),
        (GemmFormats("mxfp8", "mxfp8", "compute"), "mxfp8 (wgrad compute)"),
        (GemmFormats("mxfp8", "compute", "compute"), "mxfp8 (dgrad and wgrad compute)"),
    ],
)
def test_formats_of_gemms_in_words(formats: GemmFormats, words: str) -> None:
    assert str(formats) == words


def test_formats_have_facts() -> None:
    assert all(facts.native_multiple % facts.multiple == 0 for facts in FORMAT_FACTS.values())


def test_own_kernels_of_blocks_take_any_number_of_tokens() -> None:
    """Emulated gradients of weights round whole blocks of them."""
    words = ["--run.device=cuda", "--precision.compute=bf16", "--precision.linears=fp8_blockwise"]
    odd = ["--train.seq_len_tokens=100", "--train.micro_batch_sequences=1"]
    aligned = "which weight gradients in fp8_blockwise need"
    assert not any(aligned in problem for problem in check_rules(load_recipe(QUICKSTART, [*words, *odd]), 1))
    emulated = check_rules(load_recipe(QUICKSTART, [*words, *odd, "--precision.backend=emulated"]), 1)
    assert any(aligned in problem for problem in emulated)


def on_gpu(*words: str) -> Recipe:
    """The quickstart with formats on a GPU."""
    kernels = ["--run.device=cuda", "--precision.compute=bf16", "--perf.kernels=fused"]
    return load_recipe(QUICKSTART, [*kernels, *(f"--{word}" for word in words)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["precision.format=fp8_blockwise", "model.hidden_size=2080"],
            'precision.format = "fp8_blockwise" is the format of no module: width 2080 is no multiple of 128 (',
        ),
        (["precision.format=fp8_rowwise", "precision.modules_in_compute=*"], 'modules_in_compute: "*" (attention.qkv'),
        (
            ["precision.format=fp8_rowwise", "precision.modules_in_compute=*", "precision.only_where_faster=false"],
            'precision.format = "fp8_rowwise" is the format of no module',
        ),
        (
            ["precision.format=fp8_rowwise", "precision.experts=fp8_blockwise", "model.moe.ffn_hidden_size=96"],
            'precision.experts = "fp8_blockwise" is the format of no module: width 96 is no multiple of 128',
        ),
        (
            ["precision.format=fp8_rowwise", "precision.experts=mxfp8", "precision.modules_in_compute=*.experts"],
            'precision.experts = "mxfp8" is the format of no module: modules_in_compute: "*.experts"',
        ),
        (["precision.format=fp8_rowwise", "precision.modules_in_compute=*.experts"], ""),
        (["precision.format=fp8_rowwise"], ""),
    ],
)
def test_formats_that_no_module_gets_are_refused(words: list[str], said: str) -> None:
    problems = [problem for problem in check_rules(on_gpu(*words), 1) if "is the format of no module" in problem]
    assert len(problems) == bool(said)
    assert all(said in problem for problem in problems)


@pytest.mark.parametrize("pattern", ["", "*.qkv"])
def test_a_run_whose_formats_are_all_slower_can_be_resumed(pattern: str) -> None:
    """The gate for speed writes patterns into its recipe. Patterns of one's own are still refused."""
    recipe = on_gpu("precision.format=fp8_rowwise", f"precision.modules_in_compute={pattern}")
    choices = [FormatChoice(module, GemmFormats(), "slower", is_slower=True) for module in gemm_modules(recipe.model)]
    saved = replace(recipe, precision=keep_slower_in_compute(recipe.precision, choices))
    assert len(saved.precision.modules_in_compute) >= 3 and check_rules(saved, 1) == []
    all_kept = replace(saved.precision, modules_in_compute=("*", *saved.precision.modules_in_compute))
    assert "is the format of no module" in "".join(check_rules(replace(saved, precision=all_kept), 1))
