"""Losses that must not change by accident, as plain text: a step and its loss a line.

The data is synthetic and the initial weights are drawn alike by every supported torch. In fp64 with the reference
experts the losses are then the same on every machine to many digits; in fp32 with the fast kernel, whose initial
weights are other draws, they are the same within rounding, as long as rounding sends no token to another expert. When
a change of the losses is meant, write them anew, look at the difference, and say in the commit why it is right:

    python tests/training/test_golden.py
"""

import json
import tempfile
from itertools import product
from pathlib import Path

import pytest

from titan_moe import cli

pytestmark = pytest.mark.slow

TINY = Path(__file__).with_name("tiny.toml")
GOLDEN = Path(__file__).parents[1] / "golden"
FP64 = ("--precision.compute=fp64", "--precision.master=fp64", "--precision.reduce=fp64", "--perf.kernels=reference")
PRECISIONS = {"fp64": (FP64, 1e-8), "fp32": ((), 1e-4)}
"""Name -> overrides, and the relative difference that is forgiven."""
RECIPES = {
    "gqa_sigmoid_bias": (),
    "gqa_softmax_shared": (
        "--model.num_dense_layers=0",
        "--model.attention.qk_norm=true",
        "--model.moe.score_fn=softmax",
        "--model.moe.bias_update_speed=0",
        "--model.moe.aux_loss_coef=1e-2",
        "--model.moe.z_loss_coef=1e-3",
        "--model.moe.shared_ffn_hidden_size=32",
        "--model.embeddings_are_tied=true",
    ),
    "mla_groups_documents": (
        "--model.attention.kind=mla",
        "--model.attention.kv_lora_rank=16",
        "--model.attention.qk_nope_head_dim=16",
        "--model.attention.qk_rope_head_dim=8",
        "--model.attention.v_head_dim=16",
        "--model.attention.rope_is_interleaved=true",
        "--model.moe.num_experts=8",
        "--model.moe.num_groups=4",
        "--model.moe.top_k_groups=2",
        "--model.moe.route_scale=2.5",
        "--model.moe.shared_ffn_hidden_size=32",
        "--data.document_attention=true",
    ),
}


def losses(folder: Path, *overrides: str) -> list[float]:
    assert cli.main(["train", str(TINY), f"--run.folder={folder}", *overrides]) == 0
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def golden(name: str, precision: str) -> list[float]:
    lines = (GOLDEN / f"{name}.{precision}.txt").read_text().splitlines()
    numbers = {int(step): float(loss) for step, loss in map(str.split, lines)}
    assert list(numbers) == list(range(1, len(lines) + 1))
    return list(numbers.values())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_golden_losses(tmp_path: Path, name: str, precision: str) -> None:
    overrides, forgiven = PRECISIONS[precision]
    assert losses(tmp_path, *RECIPES[name], *overrides) == pytest.approx(golden(name, precision), rel=forgiven)


def write(name: str, precision: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = losses(Path(folder), *RECIPES[name], *PRECISIONS[precision][0])
    lines = [f"{step} {loss!r}\n" for step, loss in enumerate(found, start=1)]
    (GOLDEN / f"{name}.{precision}.txt").write_text("".join(lines))


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, precision in product(RECIPES, PRECISIONS):
        write(name, precision)
