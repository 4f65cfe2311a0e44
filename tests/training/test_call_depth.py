"""How far the step is from the GEMMs of the experts, for a reader and for the host."""

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

import titan_moe
from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.data.packing import Batch
from titan_moe.training.build import assemble

PACKAGE = str(Path(titan_moe.__file__).parent)


def calls_of_a_step() -> list[str]:
    """Our functions between the step and the first grouped GEMM of its forward, outermost first."""
    recipe = Recipe(
        model=ModelConfig(
            num_layers=1, hidden_size=32, vocab_size=64, moe=MoEConfig(num_experts=4, ffn_hidden_size=16)
        ),
        precision=PrecisionConfig("fp32", "fp32", "fp32"),
        compile=CompileConfig("off"),
    )
    step = assemble(recipe, torch.device("cpu")).step.step
    calls: list[str] = []
    grouped_mm = F.grouped_mm

    def trace(*args, **kwargs):
        frame, found = sys._getframe(1), []
        while frame.f_code.co_name != "__call__" or "training/step.py" not in frame.f_code.co_filename:
            if frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_code.co_name.startswith("<"):
                found.append(frame.f_code.co_name)
            frame = frame.f_back
        calls[:] = calls or reversed(found)
        return grouped_mm(*args, **kwargs)

    tokens = torch.zeros(1, 1, 8, dtype=torch.int64)
    with mock.patch.object(F, "grouped_mm", trace):
        step(Batch(tokens, tokens, None))
    return calls


def test_a_grouped_gemm_is_ten_calls_below_the_step(ranks) -> None:
    (calls,) = ranks(1, calls_of_a_step)
    assert calls[0] == "forward_backward" and calls[-1] == "grouped_mm" and len(calls) <= 10, calls
