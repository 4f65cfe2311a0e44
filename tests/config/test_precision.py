"""The formats of `[precision]`, by part and by GEMM."""

from pathlib import Path

import pytest

from titan_moe.config import check_rules, load_recipe
from titan_moe.config.formats import FORMAT_FACTS, GemmFormats, formats_with
from titan_moe.config.precision import PrecisionConfig


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
    assert formats_with("has_native_linears") == '"fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"'


def test_own_kernels_of_blocks_take_any_number_of_tokens() -> None:
    """Emulated gradients of weights round whole blocks of them."""
    quickstart = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
    words = ["--run.device=cuda", "--precision.compute=bf16", "--precision.linears=fp8_blockwise"]
    odd = ["--train.seq_len_tokens=100", "--train.micro_batch_sequences=1"]
    aligned = "which weight gradients in fp8_blockwise need"
    assert not any(aligned in problem for problem in check_rules(load_recipe(quickstart, [*words, *odd]), 1))
    emulated = check_rules(load_recipe(quickstart, [*words, *odd, "--precision.backend=emulated"]), 1)
    assert any(aligned in problem for problem in emulated)
