"""The loop: from a recipe to a trained model in a run folder."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_moe.checkpoint.dcp import Checkpointer
from titan_moe.config import Recipe, check_rules
from titan_moe.config.parse import RecipeError, dump_recipe
from titan_moe.data.loader import build_loader
from titan_moe.layers.attention import attention_backend
from titan_moe.metrics.environment import write_environment
from titan_moe.metrics.meter import Meter
from titan_moe.plan.count import count
from titan_moe.profile.trace import StepTracer
from titan_moe.titan import GarbageCollection
from titan_moe.train.build import assemble
from titan_moe.train.evaluate import validation_loss
from titan_moe.train.process import StopSignal, process_group
from titan_moe.train.step import StepResult

logger = logging.getLogger("titan_moe")


def run(recipe: Recipe) -> None:
    """Train a recipe to its last step, resuming if its run folder has a checkpoint.

    Raises: RecipeError if a rule is broken on this number of ranks.
    """
    with process_group(recipe.run) as device:
        recipe = replace(recipe, run=replace(recipe.run, device=device.type))
        problems = check_rules(recipe, dist.get_world_size())
        if problems:
            raise RecipeError(problems)
        with attention_backend(recipe.perf.attention):
            Trainer(recipe, device).train()


class Progress:
    """How far a run has come; travels with its checkpoints."""

    def __init__(self) -> None:
        self.step = 0
        self.tokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]


class Trainer:
    """One run on this rank: model, data, optimizer, checkpoints, metrics."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe, self.device = recipe, device
        self.run_folder = Path(recipe.run.folder)
        self.is_main = dist.get_rank() == 0
        if self.is_main:
            self._describe()
        torch.manual_seed(recipe.run.seed)
        torch.use_deterministic_algorithms(recipe.run.is_deterministic)
        self.meshes, self.model, optimizers, self.schedule, self.step = assemble(recipe, device)
        self.loader = build_loader(
            recipe, self.meshes.data_rank, self.meshes.sizes.dp, self.run_folder, barrier=lambda: dist.barrier()
        )
        self.progress = Progress()
        self.checkpointer = Checkpointer(
            recipe.checkpoint, self.run_folder, [self.model], optimizers, self.schedule, self.loader, self.progress
        )
        self.meter = Meter(
            recipe,
            self.run_folder,
            flops_per_token=count(recipe.model, recipe.train.seq_len_tokens).flops_per_token,
            device=device,
            num_ranks=dist.get_world_size(),
            is_main=self.is_main,
            total_steps=recipe.train.steps,
        )

    def train(self) -> None:
        """Run the remaining steps, then validate and let the model write a few lines."""
        recipe = self.recipe
        if self.checkpointer.load():
            logger.info("continuing after step %d", self.progress.step)
        stop = StopSignal()
        garbage = GarbageCollection(gc_freq=100)
        tracer = StepTracer(recipe.profile, self.run_folder, dist.get_rank(), self.progress.step + 1)
        self.meter.start(self.progress.step, self.progress.tokens_seen)
        while self.progress.step < recipe.train.steps and not stop.poll():
            self._one_step()
            tracer.step()
            garbage.run(self.progress.step)
        tracer.close()
        is_finished = self.progress.step == recipe.train.steps
        if recipe.checkpoint.every_steps or not is_finished:
            self.checkpointer.save(self.progress.step, is_last=True)
        if is_finished and recipe.metrics.sample_tokens:
            self._write_sample()
        self.checkpointer.close()
        self.meter.close()

    def _one_step(self) -> None:
        recipe, progress = self.recipe, self.progress
        lr = self.schedule.lr
        result: StepResult = self.step(self.loader.next_step().to(self.device))
        progress.step += 1
        num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens
        progress.tokens_seen += num_tokens
        self.meter.log(progress.step, lr=lr, num_tokens=num_tokens, **result._asdict())
        every = recipe.validation.every_steps
        if every and (progress.step % every == 0 or progress.step == recipe.train.steps):
            self.meter.log_validation(progress.step, self._validate())
        if recipe.checkpoint.every_steps and progress.step % recipe.checkpoint.every_steps == 0:
            self.checkpointer.save(progress.step)

    def _validate(self) -> Tensor:
        return validation_loss(self.model, self.loader.validation_batches(), self.device, self.meshes.data_group)

    def _write_sample(self) -> None:
        """Continue a held-out prompt. Every rank takes part, the main one prints."""
        tokenizer = self.loader.tokenizer
        prompt_BN = next(iter(self.loader.validation_batches())).tokens_MBN[0, :1, :64].to(self.device)
        tokens_N = self.model.generate(prompt_BN, self.recipe.metrics.sample_tokens)[0].tolist()
        if self.is_main:
            prompt, text = tokenizer.decode(tokens_N[:64]), tokenizer.decode(tokens_N[64:])
            print(f"--- held-out prompt ---\n{prompt}\n--- the model continues ---\n{text}")

    def _describe(self) -> None:
        """Leave the resolved recipe and the environment in the run folder."""
        self.run_folder.mkdir(parents=True, exist_ok=True)
        (self.run_folder / "recipe.toml").write_text(dump_recipe(self.recipe))
        write_environment(self.run_folder)
        if self.recipe.train.force_balanced_routing:
            logger.warning("train.force_balanced_routing = true: the router's choice is replaced, for benchmarks only")
