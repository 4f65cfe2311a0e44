"""A small model learns real text along one curve, whatever makes its steps fast."""

import json
from pathlib import Path

import pytest
import torch

from titan_moe import cli

pytestmark = pytest.mark.gpu

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
STEPS, WINDOW = 500, 50
ON_A_GPU = (
    "--run.device=cuda",
    "--precision.compute=bf16",
    f"--train.steps={STEPS}",
    "--metrics.every_steps=1",
    "--metrics.sample_tokens=0",
    "--metrics.tensorboard=false",
    "--validation.every_steps=0",
)
FAST = {
    "fused": ("--perf.kernels=fused",),
    "captured": ("--perf.kernels=fused", "--compile.cudagraph=step"),
    "one_graph_a_block": ("--perf.kernels=fused", "--compile.extent=block", "--compile.cudagraph=step"),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return curve(tmp_path_factory.mktemp("reference"), "--perf.kernels=grouped_mm", "--compile.regional=off")


def curve(folder: Path, *overrides: str) -> torch.Tensor:
    """Mean losses of every fifty steps."""
    torch._dynamo.reset()
    assert cli.main(["train", str(QUICKSTART), f"--run.folder={folder}", *ON_A_GPU, *overrides]) == 0
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    return torch.tensor(losses).view(-1, WINDOW).mean(1)


@pytest.mark.parametrize("how", FAST)
def test_fast_steps_learn_along_the_reference(tmp_path: Path, reference: torch.Tensor, how: str) -> None:
    assert reference[-1] < 0.5 * reference[0]
    torch.testing.assert_close(curve(tmp_path, *FAST[how]), reference, rtol=3e-3, atol=0)
