"""Models of one's own in the trainer: what breaks the contract of `model.class` is refused, and nothing else is."""

import logging
import sys
from pathlib import Path

import pytest
from torch import nn

from titan_moe.config import RecipeError, load_recipe
from titan_moe.run.process import process_group
from titan_moe.training.model_class import check_parts

TINY = Path(__file__).with_name("tiny.toml")
OWN_MODELS = '''
from dataclasses import replace
import torch
import torch.nn.functional as F
from torch import nn
from titan_moe import Block, LocalDispatcher, MoE, TopKRouter, Transformer


class Own(Transformer):
    """Computes its loss itself, from logits."""

    def forward(self, tokens_BN, labels_BN=None, document_ids_BN=None):
        logits_BNV = super().forward(tokens_BN, None, document_ids_BN)
        return logits_BNV if labels_BN is None else self.loss(logits_BNV.flatten(0, 1), labels_BN.flatten())


class Summed(Own):
    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum")


class Narrow(Summed):
    """Has rows for the tokenizer's ids alone."""

    def __init__(self, config, **options):
        super().__init__(replace(config, vocab_size=256), **options)


class Smoothed(Own):
    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)


class Dropping(Summed):
    def loss(self, logits, labels):
        return super().loss(F.dropout(logits, 0.5, self.training), labels)


class Confident(Summed):
    """Far worse than a uniform guess."""

    def loss(self, logits, labels):
        return super().loss(100 * logits, labels)


class Mean(Own):
    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels)


class MeanOfTokens(Own):
    """Of all tokens, also those without a label."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, reduction="sum") / labels.numel()


class MeanOfSequence(Own):
    """A sum over sequences of their means."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, reduction="none").unflatten(0, (2, -1)).mean(1).sum()


class Logits(Own):
    def loss(self, logits, labels):
        return logits


class Output(Own):
    def loss(self, logits, labels):
        return {"loss": F.cross_entropy(logits, labels, reduction="sum")}


NUM_EXCHANGES = 0


class Counting(LocalDispatcher):
    def prepare(self, topk_ids_TK, topk_scores_TK):
        global NUM_EXCHANGES
        NUM_EXCHANGES += 1
        return super().prepare(topk_ids_TK, topk_scores_TK)


class Dispatching(Transformer):
    def __init__(self, config, **options):
        super().__init__(config, **options)
        for module in self.modules():
            if isinstance(module, MoE):
                module.dispatcher = Counting(config.moe.num_experts)


class LinearRouter(nn.Linear):
    """Softmax and top-k, without balance."""

    def __init__(self, config):
        super().__init__(config.hidden_size, config.moe.num_experts, bias=False)
        self.top_k = config.moe.top_k

    def forward(self, x_BND):
        scores_TK, ids_TK = super().forward(x_BND).flatten(0, 1).softmax(-1).topk(self.top_k)
        return scores_TK, ids_TK


class Forgetful(TopKRouter):
    """One of ours that does not pass its routing to `balance`."""

    def forward(self, x_BND):
        routing = self.route(self.logits(x_BND, self.weight), self.expert_bias_E, self.rule, None)
        return routing.topk_scores_BNK.flatten(0, 1), routing.topk_ids_BNK.flatten(0, 1)


class Routing(Transformer):
    router = LinearRouter

    def __init__(self, config, **options):
        super().__init__(config, **options)
        for module in self.modules():
            if isinstance(module, MoE):
                module.router = self.router(config)


class RoutingForgetfully(Routing):
    router = Forgetful


class FrozenRouters(Transformer):
    frozen = ("router",)

    def __init__(self, config, **options):
        super().__init__(config, **options)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in self.frozen))


class FrozenExperts(FrozenRouters):
    frozen = ("experts",)


class FrozenMoE(FrozenRouters):
    frozen = ("feed_forward",)


class ExpertsAlone(FrozenRouters):
    """No gradient passes the router of layer 1, but its block is recomputed."""

    frozen = ("embed", "attention", "norm", "layers.0", "router", "head")


class FrozenBelow(FrozenRouters):
    """No gradient passes layers 0 and 1."""

    frozen = ("embed", "layers.0", "layers.1")


class AllFrozen(FrozenRouters):
    frozen = ("",)


class Deaf(Transformer):
    """Takes document ids and ignores them."""

    def contexts(self, x, document_ids_BN):
        return super().contexts(x, None)


class HalfDeaf(Transformer):
    """Ignores them in one of two layers."""

    def contexts(self, x, document_ids_BN):
        contexts = super().contexts(x, document_ids_BN)
        return contexts | {"1": super().contexts(x, None)["1"]}


class WithoutIds(Transformer):
    def forward(self, tokens_BN, labels_BN=None):
        return super().forward(tokens_BN, labels_BN)


class Wide(Transformer):
    """Has a projection more, [D, 3 D] and back, of every token."""

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.up, self.down = nn.Linear(32, 96, bias=False), nn.Linear(96, 32, bias=False)
        self.norm = nn.Sequential(self.norm, self.up, self.down)


class WideButFrozen(Wide):
    def __init__(self, config, **options):
        super().__init__(config, **options)
        self.up.requires_grad_(False)


class Claiming(Wide):
    def training_flops_per_token(self, seq_len_tokens):
        return 1000.0 * seq_len_tokens


class Masked(Transformer):
    """Attends to what it likes."""

    def contexts(self, x, document_ids_BN):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        return {name: context._replace(mask=mask) for name, context in super().contexts(x, None).items()}


class Reading(Transformer):
    """Branches on a number of the device."""

    def forward(self, tokens_BN, labels_BN=None, document_ids_BN=None):
        return super().forward(tokens_BN + int(tokens_BN.sum().item() < 0), labels_BN, document_ids_BN)


@torch.library.custom_op("own_models::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: 2 * grad)


class WithKernel(Transformer):
    def forward(self, *args):
        return twice(super().forward(*args)) / 2
'''
UNBALANCED = ("--model.moe.aux_loss_coef=0", "--model.moe.bias_update_speed=0")


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


def own(tiny, name: str, *words: str, steps: int = 3):
    return tiny(f"--train.steps={steps}", f"--model.class=own_models:{name}", *words)


@pytest.mark.parametrize("name", ["Mean", "MeanOfTokens", "MeanOfSequence"])
def test_a_mean_loss_is_refused(tiny, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = own(tiny, name)
    assert run.train() == 2
    error = capsys.readouterr().err
    assert f'model.class = "own_models:{name}" returns' in error and "for 64 random labels" in error
    assert "return the sum over label tokens, not a mean" in error
    assert not (run.folder / "recipe.toml").exists()


@pytest.mark.parametrize(("name", "found"), [("Logits", "a tensor of shape [64, 64]"), ("Output", "a dict")])
def test_what_is_no_loss_is_refused(tiny, name: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert own(tiny, name).train() == 2
    assert f"returns {found} for tokens and labels; let it return the loss, a scalar" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Summed", ("--data.document_attention=true",)),
        ("Smoothed", ()),
        ("Dropping", ("--train.seq_len_tokens=2",)),
        ("Dropping", ("--data.document_attention=true",)),
        ("Confident", ("--train.seq_len_tokens=2",)),
    ],
)
def test_a_summed_loss_is_trained(tiny, name: str, words: tuple[str, ...]) -> None:
    assert own(tiny, name, *words).train() == 0


def test_a_model_with_rows_for_the_tokenizer_alone_is_trained(tiny, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("0123456789 " * 500)
    text = ("--data.source=text", f"--data.path={tmp_path}/text", "--model.vocab_size=300")
    assert own(tiny, "Narrow", *text).train() == 0


@pytest.mark.slow
def test_a_model_of_ones_own_trains_as_ours_and_is_resumed(tiny) -> None:
    """The check changes no number, also after training: random labels stay as hard."""
    plain, run = tiny("--train.steps=30"), own(tiny, "Summed", steps=30)
    assert plain.train() == 0 and run.train("--checkpoint.every_steps=30") == 0
    assert run.column("loss") == pytest.approx(plain.column("loss"), rel=1e-4)
    assert run.again("--train.steps=31") == 0 and run.column("step")[-1] == 31


def test_a_dispatcher_of_ones_own_is_kept(tiny) -> None:
    assert own(tiny, "Dispatching").train() == 0
    assert sys.modules["own_models"].NUM_EXCHANGES >= 3 * 2, "steps and microbatches"


def test_a_dispatcher_of_ones_own_is_not_replaced(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert own(tiny, "Dispatching", "--parallel.dispatcher=alltoall").train() == 2
    error = capsys.readouterr().err
    assert 'sets Counting as the dispatcher of its MoE layers, and parallel.dispatcher = "alltoall" would' in error
    assert "register Counting with titan_moe.register_dispatcher and name it there" in error


def test_a_router_without_balance_is_refused_if_the_recipe_balances(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert own(tiny, "Routing").train() == 2
    error = capsys.readouterr().err
    asked = "model.moe.aux_loss_coef = 0.001, model.moe.bias_update_speed = 0.001"
    assert f"routes with LinearRouter, to which {asked} cannot apply; derive it from titan_moe.TopKRouter" in error


def test_a_router_without_balance_is_told(tiny, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="titan_moe")
    run = own(tiny, "Routing", *UNBALANCED)
    assert run.train() == 0 and run.column("expert_load")[0] == {}
    assert "LinearRouter is no titan_moe.TopKRouter: the trainer neither balances nor logs its loads" in caplog.messages


def test_a_router_that_counts_nothing_is_told(tiny, caplog: pytest.LogCaptureFixture) -> None:
    assert own(tiny, "RoutingForgetfully").train() == 0
    (message,) = (message for message in caplog.messages if "counts no tokens" in message)
    assert message.startswith("layers.1.feed_forward.router counts no tokens: its router does not pass")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--memory.recompute=block",)])
@pytest.mark.parametrize("name", ["FrozenRouters", "FrozenExperts", "FrozenMoE", "ExpertsAlone", "FrozenBelow"])
def test_tokens_of_frozen_parts_are_counted_once(tiny, name: str, words: tuple[str, ...]) -> None:
    """In the first step as without frozen parts: the weights are the same. Then the routing of frozen layers stays."""
    layers = ("--model.num_layers=3", "--data.is_shuffled=false", "--optim.lr=1e-4", *words)
    plain, run = tiny("--train.steps=1", *layers), own(tiny, name, *layers, steps=2)
    assert plain.train() == 0 and run.train() == 0
    first = run.trace[0]
    assert first["expert_load"] == plain.column("expert_load")[0] and len(first["expert_load"]) == 2
    assert first["idle_experts"] == plain.column("idle_experts")[0]
    assert first["aux_loss"] == pytest.approx(plain.column("aux_loss")[0], rel=1e-6)


def test_a_frozen_model_is_refused(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert own(tiny, "AllFrozen").train() == 2
    error = capsys.readouterr().err
    assert 'model.class = "own_models:AllFrozen": has no parameter that requires a gradient, all' in error


def test_a_frozen_stage_is_refused(tiny) -> None:
    """No gradient passes it, and its optimizer would have nothing."""
    recipe = load_recipe(TINY, ["--model.class=own_models:FrozenBelow", "--parallel.pp=2"])
    frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trained[0].requires_grad_(False)
    with process_group(recipe.run):
        check_parts([trained, nn.Identity()], recipe)
        with pytest.raises(RecipeError, match=r"parallel.pp = 2 all parameters of a stage are frozen \(weight, ...\)"):
            check_parts([trained, frozen], recipe)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Deaf", "HalfDeaf"])
def test_documents_that_see_each_other_are_refused(tiny, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert own(tiny, name, "--data.document_attention=true").train() == 2
    error = capsys.readouterr().err
    assert f'model.class = "own_models:{name}" does not keep documents apart' in error
    assert "or set data.document_attention = false" in error
    assert own(tiny, name, steps=1).train() == 0, "without document masks it does what it should"


def test_a_forward_without_document_ids_is_refused(tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert own(tiny, "WithoutIds").train() == 2
    error = capsys.readouterr().err
    assert (
        "has a `forward` that cannot be called as forward(tokens, labels, document_ids): too many positional" in error
    )


MATRICES = {
    "attention": 2 * (2 * 32 * 32 + 2 * 32 * 16),
    "dense": 3 * 32 * 64,
    "experts": 2 * 3 * 32 * 32,
    "head": 64 * 32,
}
"""Weights of the tiny model that a token meets: by each of them it is multiplied in forward, and twice in backward."""
PAIRS = 32 / 2
"""Tokens that a token attends to."""
TINY_FLOPS = 6 * sum(MATRICES.values()) + 6 * 2 * (2 * 2 * 16) * PAIRS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters", "active", "flops"),
    [
        ("Summed", "28.96k", "22.82k", TINY_FLOPS),
        ("Wide", "35.10k", "28.96k", TINY_FLOPS + 6 * 2 * 32 * 96),
        ("WideButFrozen", "35.10k", "28.96k", TINY_FLOPS + 6 * 2 * 32 * 96 - 2 * 32 * 96),
        ("Claiming", "35.10k", "28.96k", 32_000),
        ("Masked", "28.96k", "22.82k", None),
        ("Reading", "28.96k", "22.82k", None),
        ("WithKernel", "28.96k", "22.82k", None),
    ],
)
def test_a_model_of_ones_own_is_counted(
    tiny, name: str, parameters: str, active: str, flops: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the default model of the same fields; and rather no MFU than a wrong one."""
    caplog.set_level(logging.INFO, logger="titan_moe")
    run = own(tiny, name, steps=1)
    assert run.train() == 0
    assert caplog.messages[0].startswith(f"custom: {parameters} parameters, {active} active a token; ")
    (record,) = run.records
    if flops is None:
        assert record["tflops_per_gpu"] is None and record["mfu"] is None
        assert f'FLOPs of model.class = "own_models:{name}" are unknown' in caplog.messages[1]
    else:
        assert record["tflops_per_gpu"] == pytest.approx(flops * record["tokens_per_second_per_gpu"] / 1e12)


@pytest.mark.slow
def test_windows_are_counted_as_those_of_the_default_class(tiny) -> None:
    window = "--model.attention.sliding_window=8"
    run, plain = own(tiny, "Summed", window, steps=1), tiny("--train.steps=1", window)
    assert run.train() == 0 and plain.train() == 0
    flops = [r.records[0]["tflops_per_gpu"] / r.records[0]["tokens_per_second_per_gpu"] for r in (run, plain)]
    assert flops[0] == pytest.approx(flops[1]) and flops[0] * 1e12 < TINY_FLOPS
