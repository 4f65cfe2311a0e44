"""Frozen weights that are stored as codes: held against a model with the same numbers, and runs from end to end."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.hf_twins import ours_for, twin
from support.runs import one_process, tiny
from torch import Tensor

from titan_moe import cli
from titan_moe.adapters import low_rank, stored
from titan_moe.adapters.frozen import freeze
from titan_moe.checkpoint.codes import dtype_of_numbers
from titan_moe.checkpoint.hf import load_hf, save_hf
from titan_moe.checkpoint.hf_stream import hf_weights
from titan_moe.config.adapter import AdapterConfig, BaseFormat
from titan_moe.kernels.formats.casts import round_to
from titan_moe.kernels.formats.stored import numbers_reference
from titan_moe.models.transformer import Transformer
from titan_moe.parameters import SCALES

__all__ = ["one_process", "tiny"]
QWEN = ("--model.moe.score_fn=softmax", "--model.moe.bias_update_speed=0", "--model.attention.qk_norm=true")
QWEN += ("--model.moe.aux_loss_coef=0", "--train.global_batch_sequences=2")
CODES = ("--model.adapter.rank=4", "--model.adapter.base=fp8_rowwise")


def adapted(folder: Path, base: BaseFormat, targets: tuple[str, ...] = ("attention", "experts")) -> Transformer:
    """Ours of their checkpoint, with an adapter that changes it."""
    adapter, ours = AdapterConfig(rank=3, alpha=5.0, base=base, targets=targets), ours_for(folder)
    with torch.device("meta"):
        stored.apply(ours, adapter, ())
        low_rank.apply(ours, adapter)
    freeze(ours, (), torch.float32, has_adapters=True)
    load_hf(ours, folder)
    torch.manual_seed(1)
    for parameter in ours.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return ours


@pytest.mark.parametrize("base", ["fp8_rowwise", "fp8_blockwise"])
def test_a_model_of_codes_is_one_of_their_numbers(base: BaseFormat, tmp_path: Path) -> None:
    """Loaded from Hugging Face's files: outputs and gradients; and its files have the numbers, with adapters added."""
    twin("qwen3_moe").save_pretrained(tmp_path / "theirs")
    ours, plain = adapted(tmp_path / "theirs", base), adapted(tmp_path / "theirs", "compute")
    names = [name.removesuffix(SCALES) for name, _ in ours.named_parameters() if name.endswith(SCALES)]
    assert {name.split(".")[-2] for name in names} == {"qkv", "out", "gate_up", "down", "experts"}
    parameters = dict(plain.named_parameters())
    for name in names:
        assert ours.get_parameter(name).dtype == torch.float8_e4m3fn and not ours.get_parameter(name).requires_grad
        values = parameters[name].data
        values.copy_(round_to(values, base, "weight", -1, power_of_two_scales=True))
    tokens, labels = torch.randint(61, (2, 2, 40)).unbind()

    def gradients(model: Transformer) -> list[Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [loss := model(tokens, labels), *torch.autograd.grad(loss, trained)]

    for mine, right in zip(gradients(ours), gradients(plain), strict=True):
        assert torch.allclose(mine, right, rtol=1e-5, atol=1e-5 * right.abs().max().item())
    save_hf(ours, tmp_path / "mine")
    save_hf(plain, tmp_path / "plain")
    mine, right = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("mine", "plain"))
    assert mine.keys() == right.keys() and all(torch.allclose(mine[key], right[key], atol=1e-6) for key in right)
    assert all(weight.equal(mine[name]) for name, weight in hf_weights(ours))


def test_no_weight_in_a_wider_dtype_is_kept_for_backward(tmp_path: Path) -> None:
    twin("qwen3_moe").save_pretrained(tmp_path)
    ours = adapted(tmp_path, "fp8_rowwise", ("attention",))
    shapes = {tuple(p.shape[-2:]) for name, p in ours.named_parameters() if p.itemsize == 1}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours(torch.randint(61, (1, 7)), torch.randint(61, (1, 7)))
    assert any(tensor.itemsize == 1 for tensor in kept)
    assert not any(tuple(t.shape[-2:]) in shapes and t.itemsize > 1 and not t.requires_grad for t in kept if t.ndim > 2)
    for parameter in ours.parameters():
        parameter.requires_grad_(parameter.itemsize > 1)
    assert dtype_of_numbers(ours) == torch.float32, "that of compute, whatever trains"


def test_a_run_rounds_a_base_and_resumes_exactly(tiny, tmp_path: Path) -> None:
    """Its checkpoint has codes; what is exported from it is what the run itself exports."""
    base = tiny("--train.steps=1", *QWEN)
    assert base.train() == 0
    words = *QWEN, *CODES, f"--checkpoint.load_from={base.folder / 'checkpoints' / 'step-1'}", "--train.steps=4"
    whole, part = tiny("--checkpoint.every_steps=2", "--checkpoint.export_hf_at_end=true", *words), tiny(*words)
    assert whole.train() == 0
    assert whole.copy(part.folder, last_step=2).again("--checkpoint.export_hf_at_end=false") == 0
    after, resumed = whole.checkpoint(4), part.checkpoint(4)
    weight = "layers.1.feed_forward.experts.gate_up"
    assert after[f"/{weight}"].dtype == torch.float8_e4m3fn and after[f"/{weight}{SCALES}"].dtype == torch.float32
    for name, value in after.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == resumed[name].dtype and value.float().equal(resumed[name].float()), name
    checkpoint = whole.folder / "checkpoints" / "step-4"
    assert cli.main(["export", str(checkpoint), str(tmp_path / "merged"), "--dtype=bf16"]) == 0
    at_end, later = (next(f.glob("*.safetensors")) for f in (whole.folder / "hf" / "step-4", tmp_path / "merged"))
    assert at_end.read_bytes() == later.read_bytes()
    assert cli.main(["average", str(checkpoint), str(checkpoint), str(tmp_path / "mean")]) == 0
    assert cli.main(["export", str(tmp_path / "mean"), str(tmp_path / "of_mean"), "--dtype=bf16"]) == 0
    of_mean = next((tmp_path / "of_mean").glob("*.safetensors"))
    assert of_mean.read_bytes() == later.read_bytes()
    assert cli.main(["generate", str(checkpoint), "5 7", "--max-tokens=2"]) == 0
    plain = tiny(*QWEN, "--model.adapter.rank=4", f"--checkpoint.load_from={checkpoint}", "--train.steps=1")
    other = tiny(*QWEN, *CODES, "--model.adapter.base=fp8_blockwise", *plain.words[-2:])
    assert plain.train() == other.train() == 0
    numbers = after[f"/{weight}"].float() * after[f"/{weight}{SCALES}"][..., None]
    assert plain.checkpoint(1)[f"/{weight}"].equal(numbers)
    codes, scales = (other.checkpoint(1)[f"/{weight}{end}"] for end in ("", SCALES))
    rounded = round_to(numbers, "fp8_blockwise", "weight", -1, power_of_two_scales=True)
    assert numbers_reference(codes, scales, torch.float32).equal(rounded)


def test_codes_of_a_light_checkpoint_are_rounded_from_its_base(tiny, capfd: pytest.CaptureFixture[str]) -> None:
    """Also beside layers that train; a run cannot begin with it."""
    base = tiny("--train.steps=1", *QWEN)
    assert base.train() == 0
    origin = f"--checkpoint.load_from={base.folder / 'checkpoints' / 'step-1'}"
    words = *QWEN, *CODES, '--optim.trainable=["layers.1.*"]', "--train.steps=1"
    light, whole = tiny(*words, origin, "--checkpoint.saves_frozen=false"), tiny(*words, origin)
    assert light.train() == whole.train() == 0
    capfd.readouterr()
    for run in (light, whole):
        assert cli.main(["evaluate", str(run.folder), "--run.device=cpu", "--data.source=synthetic"]) == 0
    first, second = (line for line in capfd.readouterr().out.splitlines() if line.startswith("data"))
    assert first == second
    assert tiny(*words, f"--checkpoint.load_from={light.folder / 'checkpoints' / 'step-1'}").train() == 2
    assert "it has no frozen weights (checkpoint.saves_frozen = false)" in capfd.readouterr().err


def test_a_random_base_is_drawn_into_codes(tiny, caplog: pytest.LogCaptureFixture) -> None:
    """The numbers are those of a base in compute's dtype, rounded."""
    caplog.set_level("INFO", logger="titan_moe")
    plain, codes = tiny("--model.adapter.rank=4", "--train.steps=1"), tiny(*CODES, "--train.steps=1")
    assert plain.train() == 0 and codes.train() == 0
    before, after = plain.checkpoint(1), codes.checkpoint(1)
    for name in ("/layers.0.attention.qkv.weight", "/layers.1.feed_forward.experts.down"):
        numbers = after[name].float() * after[f"{name}{SCALES}"][..., None]
        assert numbers.equal(round_to(before[name], "fp8_rowwise", "weight", -1, power_of_two_scales=True))
    (told,) = (record.message for record in caplog.records if "codes of" in record.message)
    assert re.fullmatch(
        r"trained: [\d,]+ parameters, .*; the others are frozen, in codes of fp8_rowwise and fp32", told
    )
