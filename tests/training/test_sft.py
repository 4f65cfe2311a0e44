"""Fine-tuning on conversations has the losses of transformers with the same samples, each conversation by itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.chat_templates import TEMPLATES, make_tokenizer
from support.hf_twins import twin
from support.runs import Run
from torch import nn

from titan_moe import cli
from titan_moe.config.parse import load_recipe
from titan_moe.data.loader import build_loader

STEPS, LR = 20, 2e-3


def rows() -> list[dict[str, Any]]:
    """Conversations of one or two turns; the answers have their numbers."""
    texts = [f"#{number}#{' the answer of the model' * (number % 3)}" for number in range(48)]
    turns = [
        [("user", "what the user has asked " * (number % 3)), ("assistant", text)] for number, text in enumerate(texts)
    ]
    return [
        {"messages": [{"role": role, "content": text} for role, text in turn + turn * (number % 5 == 0)]}
        for number, turn in enumerate(turns)
    ]


@pytest.fixture
def make_sft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Run, Any, nn.Module]]:
    """A run on conversations from a tiny checkpoint; transformers' tokenizer and model of it."""
    transformers = pytest.importorskip("transformers")
    folder, data = tmp_path / "hf", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    model = twin("qwen3_moe", vocab_size=400, num_hidden_layers=2)
    model.save_pretrained(folder)
    make_tokenizer(folder, TEMPLATES["chatml"])
    assert cli.main(["recipe", str(folder)]) == 0
    (tmp_path / "sft.toml").write_text(capsys.readouterr().out)
    for part in range(2):
        (data / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows()[24 * part : 24 * part + 24])))

    def make(*words: str) -> tuple[Run, Any, nn.Module]:
        run = Run(tmp_path / "run")
        run.words[1] = str(tmp_path / "sft.toml")
        run.words += [
            *("--data.source=datasets", "--data.path=json", f"--data.files={data}/*.jsonl", "--data.format=chat"),
            *("--data.document_attention", f"--train.steps={STEPS}", "--train.seq_len_tokens=64", "--run.device=cpu"),
            *("--train.global_batch_sequences=4", "--train.micro_batch_sequences=4", f"--optim.lr={LR}"),
            *(
                "--optim.weight_decay=0",
                "--optim.min_lr_ratio=1",
                "--optim.max_grad_norm=0",
                "--precision.compute=fp32",
            ),
            *("--model.moe.aux_loss_coef=0", "--metrics.every_steps=1", "--metrics.tensorboard=false"),
            *("--optim.warmup_steps=0", "--optim.decay_steps=0", "--validation.every_steps=0"),
            *("--perf.kernels=reference", *words),
        ]
        return run, transformers.AutoTokenizer.from_pretrained(folder), model

    return make


def numbers_of_steps(run: Run) -> list[list[int]]:
    """The conversations of each step, by what is learned of them."""
    recipe = load_recipe(run.words[1], run.words[2:])
    loader, steps = build_loader(recipe, 0, 1, run.folder, barrier=lambda: None), []
    for _ in range(STEPS):
        labels = loader.next_step().labels_MBN.flatten()
        found = loader.tokenizer.decode(labels[labels >= 0].tolist()).split("#")[1::2]
        steps.append(sorted({int(number) for number in found}))
    return steps


def losses_of_transformers(model: nn.Module, tokenizer: Any, steps: list[list[int]]) -> list[float]:
    """A loop with a conversation in each row of a padded batch, and -100 as label outside of answers."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.95), weight_decay=0), []
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded = [tokenizer.apply_chat_template(row["messages"], **options) for row in rows()]
    for numbers in steps:
        total, count = torch.zeros(()), 0
        length = max(len(encoded[number]["input_ids"]) for number in numbers)
        ids, labels = torch.zeros(len(numbers), length, dtype=torch.long), torch.full((len(numbers), length), -100)
        attention_mask = torch.zeros_like(ids)
        for row, number in enumerate(numbers):
            own = torch.tensor(encoded[number]["input_ids"])
            ids[row, : len(own)], attention_mask[row, : len(own)] = own, 1
            labels[row, : len(own)] = own.where(torch.tensor(encoded[number]["assistant_masks"]) == 1, -100)
        logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1]
        total = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        count = int((labels[:, 1:] != -100).sum())
        loss = total / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_losses_are_those_of_transformers(make_sft: Callable[..., tuple[Run, Any, nn.Module]]) -> None:
    run, tokenizer, model = make_sft()
    assert run.train() == 0
    steps = numbers_of_steps(run)
    assert len({tuple(step) for step in steps}) > 5 and max(map(len, steps)) > 6
    expected = losses_of_transformers(model, tokenizer, steps)
    assert run.column("loss") == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.8 * expected[0]
