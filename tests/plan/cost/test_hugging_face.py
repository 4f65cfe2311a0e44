"""Host memory of an import and an export, and what `check` says of it."""

from pathlib import Path

from titan_moe.config import load_recipe
from titan_moe.config.parallel import planning
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.hugging_face import (
    MAX_FILE_BYTES,
    MAX_READ_BYTES,
    export_bytes,
    fused_import_bytes,
    import_bytes,
)

QWEN3 = Path(__file__).parents[3] / "recipes" / "qwen3_30b_a3b.toml"
WORDS = ["--checkpoint.load_from=hf:theirs", "--checkpoint.export_hf_at_end=true"]


def test_host_memory_is_that_of_slices_and_of_files() -> None:
    recipe = load_recipe(QWEN3, WORDS)
    embedding, expert = 151_936 * 2048, 768 * 2048
    slices = import_bytes(recipe, 8)
    assert slices.part == embedding // 8 * 2, "FSDP divides it over 8 ranks"
    assert slices.rank == 4 * embedding // 8 * (2 + 4) and slices.host == 8 * slices.rank
    assert import_bytes(load_recipe(QWEN3, [*WORDS, "--model.vocab_size=256"]), 8).part == expert * 2
    assert fused_import_bytes(recipe, 8) == 4 * 3 * MAX_READ_BYTES, "16 experts of 12.6 MB"
    few = load_recipe(QWEN3, [*WORDS, "--model.moe.num_experts=32", "--model.moe.top_k=2"])
    assert fused_import_bytes(few, 8) == 4 * 3 * 4 * (4 * 2 * expert), "of the experts that a rank has"
    assert export_bytes(recipe, 8) == (MAX_FILE_BYTES, 2 * MAX_FILE_BYTES, 16 * MAX_FILE_BYTES)
    with planning():
        assert export_bytes(recipe, 32).host == 16 * MAX_FILE_BYTES, "of a host, not of all"
    two_layers = load_recipe(QWEN3, [*WORDS, "--model.num_layers=2", "--model.vocab_size=1024"])
    small = export_bytes(two_layers, 8)
    assert small.rank == small.host == 2 * small.part < 2 * MAX_FILE_BYTES, "one rank writes the only file"


def test_check_says_it_where_it_happens() -> None:
    report = describe(load_recipe(QWEN3, WORDS), 8)
    assert "weights     import: 4 slices at a time, of bf16 weights up to 0.0724 GiB; about 0.869 GiB" in report
    assert (
        "export: in bf16, files of up to 4.66 GiB; about 9.31 GiB of host memory a rank, 74.5 GiB a host of 8" in report
    )
    assert "weights  " not in describe(load_recipe(QWEN3), 8)
