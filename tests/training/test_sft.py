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


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL, which is no requirement of the tests."""
    return pytest.importorskip("trl")


def make_trl_trainer(
    trl: Any, model: nn.Module, tokenizer: Any, steps: list[list[int]], kind: str, folder: Path
) -> tuple[Any, list[float]]:
    """TRL's trainer with our conversations of each step in two unequal batches; its losses appear in the list."""
    datasets = pytest.importorskip("datasets")
    losses = [0.0] * STEPS

    class Trainer(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        """Only the order of batches and the shape of the schedule are ours."""

        def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, packing: bool, *rest: Any) -> Any:
            rows = super()._prepare_dataset(dataset, processing_class, args, False, *rest)
            assert len(rows) == len(dataset)
            rows = rows.select_columns(["input_ids", "labels"])
            parts = [rows.select(numbers) for numbers in steps]
            if packing:
                parts = [trl.pack_dataset(part, args.max_length, "bfd") for part in parts]
            self.batches, first = [], 0
            for part in parts:
                cut, last = first + 1 + len(part) // 4, first + len(part)
                self.batches += [list(range(first, cut)), list(range(cut, last))]
                first = last
            return datasets.concatenate_datasets(parts)

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                self.train_dataset, batch_sampler=self.batches, collate_fn=self.data_collator
            )

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            factors = [1 / 4, 1 / 2, 3 / 4, *[0.1 + 0.9 * left / 16 for left in range(16, -1, -1)]]
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: factors[min(step, STEPS - 1)]
            )
            return self.lr_scheduler

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses[self.state.global_step] += loss.item()
            return loss

    config = trl.SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        learning_rate=LR,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=5.0,
        assistant_only_loss=True,
        router_aux_loss_coef=0.0,
        packing=kind == "packed",
        padding_free=kind == "padding-free",
        max_length=None if kind == "padding-free" else 65,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    dataset = datasets.Dataset.from_list(rows())
    return Trainer(model=model, args=config, train_dataset=dataset, processing_class=tokenizer), losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["padded", "padding-free", "packed"])
def test_losses_are_those_of_trl(trl: Any, make_sft: Callable[..., tuple[Run, Any, nn.Module]], kind: str) -> None:
    """The trainer itself, with weight decay, clipping, a schedule and accumulation."""
    run, tokenizer, model = make_sft(
        *("--optim.weight_decay=0.1", "--optim.max_grad_norm=5.0", "--optim.warmup_steps=4", "--optim.decay_steps=16"),
        *("--optim.min_lr_ratio=0.1", "--optim.decay=linear", "--train.micro_batch_sequences=2"),
    )
    assert run.train() == 0
    norms = run.column("grad_norm")
    assert min(norms) < 5.0 < max(norms)
    trainer, expected = make_trl_trainer(trl, model, tokenizer, numbers_of_steps(run), kind, run.folder / "trl")
    trainer.train()
    assert run.column("loss") == pytest.approx(expected, rel=1e-4)
