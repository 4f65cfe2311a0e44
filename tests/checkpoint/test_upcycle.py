"""A dense model of transformers begins a MoE model: the first logits are its own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_twins import DENSE_TWINS, dense_twin

from titan_moe.checkpoint.find import find_checkpoint, recipe_to_use
from titan_moe.checkpoint.hf import load_hf, save_hf
from titan_moe.checkpoint.hf_folder import HuggingFaceError
from titan_moe.checkpoint.hf_names.dense import DENSE
from titan_moe.checkpoint.hf_recipe import read_model, upcycled_text
from titan_moe.checkpoint.masters import MasterState
from titan_moe.checkpoint.weights import saved_shapes
from titan_moe.cli import main
from titan_moe.config.kernels import Kernels
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parse import load_recipe
from titan_moe.config.precision import PrecisionConfig
from titan_moe.config.upcycle import UpcycleConfig
from titan_moe.layers.init import init_weights
from titan_moe.models.transformer import Transformer
from titan_moe.parallel import masters
from titan_moe.parameters import full_tensor
from titan_moe.training import use

MOES = {
    "whole": (MoEConfig(5, 3, 42), 1),
    "pieces": (MoEConfig(15, 6, 14), 3),
    "sigmoid": (MoEConfig(12, 6, 14, score_fn="sigmoid", route_scale=2.5, num_groups=4, top_k_groups=3), 3),
    "shared": (MoEConfig(8, 4, 16, shared_ffn_hidden_size=10), 2),
}


def upcycled(folder: Path, model: ModelConfig, how: UpcycleConfig) -> Transformer:
    ours = Transformer(model, kernels=Kernels(experts="reference"))
    for tensor in ours.state_dict().values():
        tensor.fill_(torch.nan)
    load_hf(ours, folder, upcycle=how, seed=1)
    return ours


def dense_model(folder: Path, moe: MoEConfig, **kinds: Any) -> ModelConfig:
    config = json.loads((folder / "config.json").read_text())
    model = DENSE[config["model_type"]].read(config)[0]
    return replace(model, moe=moe, **kinds)


@pytest.mark.parametrize("name", DENSE_TWINS)
def test_first_logits_are_those_of_the_dense_model(name: str, tmp_path: Path) -> None:
    theirs = dense_twin(name)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    tokens, labels = torch.randint(61, (2, 2, 40)).unbind()
    expected = theirs(tokens).logits
    for kind, (moe, granularity) in MOES.items():
        kinds = {"moe_every": 2} if kind == "pieces" else {}
        ours = upcycled(tmp_path, dense_model(tmp_path, moe, **kinds), UpcycleConfig(granularity))
        assert (ours(tokens) - expected).abs().max() <= 1e-5 * expected.abs().max(), kind
        router = dict(ours.named_parameters())["layers.1.feed_forward.router.weight"]
        of_groups = router.unflatten(0, (-1, granularity))
        assert torch.equal(of_groups[:, :1].expand_as(of_groups), of_groups)
        assert len(of_groups[:, 0].unique(dim=0)) == len(of_groups)
        losses = []
        optimizer = torch.optim.AdamW(ours.parameters(), lr=3e-3)
        for _ in range(4):
            optimizer.zero_grad()
            loss = ours(tokens, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True), kind
        assert router.grad is not None
        assert router.grad.any()


def test_noise_tells_copies_apart(tmp_path: Path) -> None:
    dense_twin("llama").save_pretrained(tmp_path)
    model = dense_model(tmp_path, MoEConfig(4, 2, 21))
    plain, noisy, again = (
        upcycled(tmp_path, model, UpcycleConfig(2, noise_std)).state_dict() for noise_std in (0.0, 0.02, 0.02)
    )
    for name, tensor in plain.items():
        assert torch.equal(noisy[name], again[name])
        difference = noisy[name] - tensor
        if ".experts." not in name:
            assert not difference.any()
            continue
        assert difference.std().item() == pytest.approx(0.02, rel=0.1)
        assert torch.equal(tensor[0], tensor[2])
        assert not torch.equal(noisy[name][0], noisy[name][2])


@pytest.mark.parametrize(("name", "how"), [("shared", UpcycleConfig(2)), ("sigmoid", UpcycleConfig(3, 0.1))])
def test_split_masters_have_all_bits(name: str, how: UpcycleConfig, tmp_path: Path) -> None:
    """Also where down projections are scaled, and copies have noise."""
    dense_twin("llama").save_pretrained(tmp_path)
    model = dense_model(tmp_path, MOES[name][0], num_dense_layers=1)
    expected = upcycled(tmp_path, model, how)
    split = Transformer(model, kernels=Kernels(experts="reference")).bfloat16()
    masters.apply(split, PrecisionConfig(master="fp32_split"))
    init_weights(split, 1, 0.02, 2)
    load_hf(split, tmp_path, upcycle=how, seed=1)
    state = MasterState([split]).state_dict()
    for name, parameter in expected.named_parameters():
        assert state[name].dtype == torch.float32 and torch.equal(state[name], parameter), name


def test_a_run_without_its_frozen_weights_is_used(tmp_path: Path) -> None:
    """They are the dense model's, but for routers, which are drawn and so are saved."""
    dense_twin("llama").save_pretrained(tmp_path / "dense")
    (tmp_path / "upcycled.toml").write_text(upcycled_text(tmp_path / "dense", 4, 2))
    words = "--run.device=cpu --run.seed=1 --train.steps=1 --train.seq_len_tokens=16 --train.global_batch_sequences=2 "
    words += "--train.micro_batch_sequences=2 --optim.kind=adamw --precision.compute=fp32 --precision.master=fp32 "
    words += "--precision.moments=master --perf.kernels=reference --checkpoint.export_hf_at_end=false "
    words += '--optim.trainable=["*.attention.*"] --data.source=synthetic --data.path= --data.tokenizer= '
    words += f"--metrics.tensorboard=false --checkpoint.saves_frozen=false --run.folder={tmp_path / 'run'}"
    assert main(["train", str(tmp_path / "upcycled.toml"), *words.split()]) == 0
    found = find_checkpoint(tmp_path / "run")
    saved = {name.split(".", 2)[-1] for name in saved_shapes(found.folder)[0] if name.startswith("layers.1.")}
    assert "feed_forward.router.weight" in saved
    assert "feed_forward.experts.down" not in saved
    recipe = recipe_to_use(found, ["--run.device=cpu", "--perf.kernels=reference"])
    expected = upcycled(tmp_path / "dense", recipe.model, UpcycleConfig(2)).state_dict()
    with use.loaded(recipe) as loaded:
        for name, tensor in loaded.parts[0].state_dict().items():
            assert ".attention." in name or torch.equal(full_tensor(tensor), expected[name]), name


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    dense_twin("llama").save_pretrained(tmp_path / "dense")
    model = dense_model(tmp_path / "dense", MoEConfig(4, 2, 20))
    with pytest.raises(HuggingFaceError, match="dense MLP has 42 hidden units.*ffn_hidden_size = 20 have 40"):
        upcycled(tmp_path / "dense", model, UpcycleConfig(2))
    with pytest.raises(HuggingFaceError, match=r"is of llama, a dense model.*checkpoint\.upcycle\.granularity"):
        read_model(tmp_path / "dense")
    with pytest.raises(HuggingFaceError, match="granularity 4 does not divide 42 units"):
        upcycled_text(tmp_path / "dense", 8, 4)
    moe = Transformer(ModelConfig(moe=MoEConfig(4, 2, 20)))
    save_hf(moe, tmp_path / "moe")
    with pytest.raises(HuggingFaceError, match="dense families are qwen3, llama, mistral"):
        load_hf(moe, tmp_path / "moe", upcycle=UpcycleConfig(1))
    with pytest.raises(HuggingFaceError, match="--upcycle needs a dense model"):
        upcycled_text(tmp_path / "moe", 8, 1)


@pytest.mark.parametrize(("name", "exported"), [("qwen3", "qwen3_moe"), ("llama", "mixtral"), ("mistral", "mixtral")])
def test_a_recipe_is_written_and_its_model_goes_out(name: str, exported: str, tmp_path: Path) -> None:
    theirs = dense_twin(name, **{"use_sliding_window": False} if name == "qwen3" else {})
    theirs.save_pretrained(tmp_path / "dense")
    path = tmp_path / "upcycled.toml"
    path.write_text(upcycled_text(tmp_path / "dense", 4, 2))
    recipe = load_recipe(path)
    assert (recipe.model.moe.num_experts, recipe.model.moe.top_k, recipe.model.moe.ffn_hidden_size) == (8, 4, 21)
    assert recipe.checkpoint.upcycle.granularity == 2
    assert recipe.checkpoint.export_hf_at_end
    ours = upcycled(tmp_path / "dense", recipe.model, UpcycleConfig(2))
    save_hf(ours, tmp_path / "moe", source=tmp_path / "dense")
    family, again, _ = read_model(tmp_path / "moe")
    assert family.model_type == exported
    assert again.moe == recipe.model.moe
    tokens = torch.arange(40)[None]
    other = Transformer(again, kernels=Kernels(experts="reference"))
    load_hf(other, tmp_path / "moe")
    assert (other(tokens) - theirs(tokens).logits).abs().max() <= 1e-4 * theirs(tokens).logits.abs().max()


def test_the_command_line_writes_such_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **DENSE_TWINS["mistral"][1]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["recipe", str(tmp_path), "--upcycle", "8", "--granularity", "3"]) == 0
    assert "granularity = 3" in capsys.readouterr().out
    for words, said in (
        (["--upcycle", "8"], "needs the HF_FOLDER"),
        ([str(tmp_path), "--granularity", "2"], "--upcycle"),
    ):
        with pytest.raises(SystemExit):
            main(["recipe", *words])
        assert said in capsys.readouterr().err
