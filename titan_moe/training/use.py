"""Use a model that is trained: load a checkpoint under the layout of a recipe, continue texts, evaluate data."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_moe.checkpoint.find import HUGGING_FACE
from titan_moe.checkpoint.hf import load_hf
from titan_moe.checkpoint.read import CheckpointMismatch, load_weights
from titan_moe.config import Recipe, RecipeError, refusals
from titan_moe.config.context import sequence_shard
from titan_moe.config.gemms import multiple_of
from titan_moe.config.model import ModelConfig
from titan_moe.data.chat.records import Conversation
from titan_moe.data.loader import Loader, build_loader
from titan_moe.data.packing import IGNORE_LABEL, Batch
from titan_moe.data.sources import open_for_evaluation, open_source
from titan_moe.data.tokenizer import NumberTokenizer, Tokenizer, build_tokenizer
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.layers.attention import attention_backend
from titan_moe.models.generate import PROMPT_TOKENS, NextLogits, TextGenerator
from titan_moe.parallel.mesh import Meshes, build_meshes
from titan_moe.parallel.pipeline.model import Model, whole_model
from titan_moe.parallel.spread_rows import spread
from titan_moe.plan.resolved import Resolved
from titan_moe.run.device import is_first_of_node
from titan_moe.run.process import process_group
from titan_moe.training.build import build_on_meta, build_parts
from titan_moe.training.chat_prompts import render
from titan_moe.training.evaluate import evaluating, reported, summed_loss


class Loaded(NamedTuple):
    """A model with its weights, on this rank."""

    model: Model
    parts: list[nn.Module]
    meshes: Meshes
    device: torch.device


@contextmanager
def loaded(recipe: Recipe, *, sizes_forwards: bool = False, is_ema: bool = False) -> Iterator[Loaded]:
    """The model of a recipe with the weights of its `checkpoint.load_from`, or with `is_ema` their averages, in
    evaluation mode. With `sizes_forwards`, `train.seq_len_tokens` is the size of a forward, of several texts or of a
    part of one. Collective.

    Raises: RecipeError or HuggingFaceError if the recipe cannot run here, or the checkpoint is of another model.
    """
    with process_group(recipe.run) as device, attention_backend(recipe.perf.attention):
        recipe = replace(recipe, run=replace(recipe.run, device=device.type))
        if problems := refusals(_for_texts(recipe) if sizes_forwards else recipe, dist.get_world_size()):
            raise RecipeError(problems)
        resolved = Resolved(recipe, dist.get_world_size())
        meshes = build_meshes(resolved.sizes, device)
        factors = recipe.parallel.fixed_capacity_factor, recipe.parallel.expert_layer_capacity_factor
        capacity = ExpertCapacity(factors[0], device, factors[1])
        model = build_on_meta(recipe)
        parts = build_parts(model, resolved, meshes, device, capacity)
        source = recipe.checkpoint.load_from
        if source.startswith(HUGGING_FACE):
            load_hf(parts, source.removeprefix(HUGGING_FACE), recipe.checkpoint.load_without)
        else:
            try:
                load_weights(parts, Path(source), dist.new_group(backend="gloo"), is_ema=is_ema)
            except CheckpointMismatch as error:
                raise RecipeError([str(error)]) from error
        with evaluating(parts), capacity.unbounded():
            yield Loaded(whole_model(parts, resolved, meshes), parts, meshes, device)
            capacity.check()


def _for_texts(recipe: Recipe) -> Recipe:
    """The same for rules: LongRoPE bounds texts, not forwards."""
    attention = recipe.model.attention
    bound = max(attention.longrope_original_tokens, recipe.train.seq_len_tokens)
    return replace(recipe, model=replace(recipe.model, attention=replace(attention, longrope_original_tokens=bound)))


@dataclass(frozen=True)
class Sampling:
    """How texts go on."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    end_tokens: tuple[int, ...] = ()
    """Besides the end of a document."""
    batch_size: int = 16
    """Prompts that go on together."""


class Text(NamedTuple):
    """A prompt and what follows it."""

    prompt: str
    completion: str
    num_tokens: int
    """Of the completion, without the end token."""
    has_ended: bool
    """Whether an end token follows it."""


def generate(
    recipe: Recipe, prompts: Sequence[str] | Sequence[Conversation], sampling: Sampling, *, is_ema: bool = False
) -> list[Text]:
    """Continue texts, or answer conversations: ranks of dp compute some of them each, and all get all. Collective.

    Raises: RecipeError or HuggingFaceError if the model cannot be loaded, or a prompt has no token.
    """
    tokenizer = _tokenizer(recipe)
    chats = render(recipe, tokenizer, [prompt for prompt in prompts if not isinstance(prompt, str)])
    texts_before = chats.texts or [str(prompt) for prompt in prompts]
    ids = chats.ids or [_encoded(prompt, tokenizer) for prompt in texts_before]
    if problem := _too_long(recipe.model, max(map(len, ids)), sampling.max_tokens):
        raise RecipeError([problem])
    starts, texts = range(0, len(ids), sampling.batch_size), []
    batches = [range(start, min(start + sampling.batch_size, len(ids))) for start in starts]
    with loaded(_with_room(recipe, ids, sampling), sizes_forwards=True, is_ema=is_ema) as use:
        if not hasattr(use.model, "generate"):
            raise RecipeError([f'model.class = "{recipe.model.class_}" has no `generate`'])
        generator = torch.Generator(use.device).manual_seed(sampling.seed)
        ends = {*sampling.end_tokens} | chats.end_tokens | ({tokenizer.end_of_document} - {None})
        for batch in batches:
            lengths_B = torch.tensor([len(ids[i]) for i in batch], device=use.device)
            longest = int(lengths_B.max())
            tokens_BN = torch.tensor([ids[i] + [0] * (longest - len(ids[i])) for i in batch], device=use.device)
            options: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "end_tokens": ends}
            options |= {"lengths_B": lengths_B, "generator": generator, "agree": _first_ranks}
            if isinstance(use.model, TextGenerator):  # a class of one's own may have fewer options
                options["spread"] = partial(_spread, use)
            continued_BN = use.model.generate(tokens_BN, sampling.max_tokens, **options)
            for i, row in zip(batch, continued_BN.tolist(), strict=True):
                added = row[len(ids[i]) : len(ids[i]) + sampling.max_tokens]
                stop = next((place for place, token in enumerate(added) if token in ends), len(added))
                texts.append(Text(texts_before[i], tokenizer.decode(added[:stop]), stop, stop < len(added)))
    return texts


def _tokenizer(recipe: Recipe) -> Tokenizer:
    data, split = recipe.data, recipe.data.split_special_tokens
    source = "text" if data.tokenizer else data.source  # a prompt is text, whatever the model is trained on
    try:
        return build_tokenizer(data.tokenizer, source, recipe.model.vocab_size, split_special_tokens=split)
    except (ValueError, OSError) as error:
        raise RecipeError([str(error)]) from error


def _encoded(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt; without any, the end of a document before it."""
    try:
        ids = tokenizer.encode(prompt)
    except ValueError as error:
        problem = f"the prompt {prompt[:40]!r} cannot be encoded: {error}"
        if isinstance(tokenizer, NumberTokenizer):
            way_out = "name a tokenizer with --data.tokenizer=FOLDER, or --data.tokenizer=bytes"
            problem = f"without a tokenizer a prompt is ids, such as '5 7', not {prompt[:40]!r}; {way_out}"
        raise RecipeError([problem]) from error
    if not ids and tokenizer.end_of_document is None:
        raise RecipeError(["an empty prompt needs a tokenizer with an end token; give a prompt"])
    return ids or [tokenizer.end_of_document or 0]


def _too_long(model: ModelConfig, num_tokens: int, max_tokens: int) -> str:
    """What is wrong with the longest text under LongRoPE's divisors for short ones; empty if nothing is."""
    a, longest = model.attention, num_tokens + max_tokens
    if not a.longrope_short_factor or a.longrope_applies != "short" or longest <= a.longrope_original_tokens:
        return ""
    bound = f'model.attention.longrope_original_tokens = {a.longrope_original_tokens} with longrope_applies = "short"'
    way_out = "lower --max-tokens, or set --model.attention.longrope_applies=long"
    return f"the longest prompt has {num_tokens} tokens, with --max-tokens {longest}, more than {bound}; {way_out}"


def _with_room(recipe: Recipe, ids: Sequence[Sequence[int]], sampling: Sampling) -> Recipe:
    """The recipe with microbatches as large as any forward: of a piece of prompts, or of whole texts in a class of the
    user's own, whose forward may keep no keys. All ranks of cp have all tokens of a piece, but with `ulysses`."""
    batch, longest = min(sampling.batch_size, len(ids)), max(map(len, ids)) + sampling.max_tokens
    p, train = recipe.parallel, recipe.train
    length, rows = min(batch * longest, max(PROMPT_TOKENS, batch)), 1 if p.cp_kind == "ulysses" else max(p.cp, 1)
    if recipe.model.class_ != ModelConfig.class_:
        length, rows = longest, batch
    of_formats = [multiple_of(recipe.precision, name) for name in recipe.precision.formats]  # no gradient needs them
    multiple = math.lcm(max(p.length_multiple, 1), *(max(p.cp, 1) * max(p.tp, 1) * step for step in of_formats))
    num_microbatches = train.global_batch_sequences // train.micro_batch_sequences
    sizes: dict[str, Any] = {"seq_len_tokens": -(-length // multiple) * multiple, "micro_batch_sequences": rows}
    batch = rows * num_microbatches
    model = replace(recipe.model, moe=replace(recipe.model.moe, pad_to_capacity=False))  # texts drop nothing
    train = replace(train, **sizes, global_batch_sequences=batch, batch_schedule=())
    return replace(recipe, model=model, train=train)


def _spread(use: Loaded, next_logits: NextLogits, is_cached: bool) -> NextLogits:
    """Rows by rank. Ranks of cp have parts of the same tokens in whole forwards, and with `ulysses`."""
    model: Any = use.model
    return spread(next_logits, use.meshes, over_cp=is_cached and model.new_tokens.num_ranks == 1)


def _first_ranks(tokens_B: Tensor) -> Tensor:
    """The tokens of the first rank on all ranks: rounding may differ between ranks."""
    tokens_B = tokens_B.contiguous()
    dist.broadcast(tokens_B, src=0)
    return tokens_B


class Evaluation(NamedTuple):
    """The loss on a source of data."""

    source: str
    loss: float
    """Mean cross entropy of a label token, in nats."""
    num_tokens: int
    num_bytes: int
    """Of the text of the label tokens; 0 if they have none."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_a_byte(self) -> float | None:
        """The loss in bits over the bytes of the text."""
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes if self.num_bytes else None


def evaluate(
    sources: Sequence[tuple[str, Recipe]], *, all_sequences: bool, held_out: bool, is_ema: bool = False
) -> list[Evaluation]:
    """Evaluate one model on each source, whose recipes differ in `[data]` alone. Collective.

    With `held_out` on what its run validates, each set under its name, and the mean that the run logs, else on all of
    the data; on `validation.num_sequences` sequences of it, evenly spaced, unless `all_sequences`.

    Raises: RecipeError or HuggingFaceError if the model cannot be loaded or the data not be read.
    """
    results = []
    with loaded(sources[0][1], is_ema=is_ema) as use:
        meshes, group = use.meshes, dist.new_group(backend="gloo")
        for name, recipe in sources:
            loader = _loader(recipe, use, group, held_out=held_out, all_sequences=all_sequences)
            sets = loader.validation_names if held_out else [""]
            if "" in sets and not loader.num_held_out:
                reason = f"data.holdout_fraction = {recipe.data.holdout_fraction} has held nothing out"
                raise RecipeError([f"{name}: {reason}; name data with --data.path=FILES"])
            for set_ in sets:
                num_bytes = torch.zeros((), dtype=torch.float64, device=use.device)
                batches = _counting(loader, set_, sequence_shard(recipe.parallel, meshes.context_rank), num_bytes)
                batches = reported(batches, set_ or name, -(-loader.num_validated(set_) // meshes.sizes.dp))
                loss, num_tokens = summed_loss(use.model, use.parts, batches, use.device, meshes).tolist()
                if meshes.context_rank:
                    num_bytes.zero_()  # ranks of cp have seen the same whole sequences
                dist.all_reduce(num_bytes, group=meshes.data_group)
                results.append(Evaluation(set_ or name, loss / max(num_tokens, 1), int(num_tokens), int(num_bytes)))
            if "" not in sets and len(sets) > 1:
                results.append(_mean_of_sets(results))
    return results


def _mean_of_sets(results: Sequence[Evaluation]) -> Evaluation:
    """What a run logs as `validation_loss` where all that it validates are sets: each counts alike."""
    loss = sum(result.loss for result in results) / len(results)
    return Evaluation("mean of sets", loss, sum(result.num_tokens for result in results), 0)


def table_of(results: Sequence[Evaluation], *, held_out: bool = False) -> list[str]:
    """A line for each source, and, unless they are what a run has held out, one for all of them, each token counted
    alike."""
    num_tokens = sum(result.num_tokens for result in results)
    if len(results) > 1 and not held_out:
        loss = sum(result.loss * result.num_tokens for result in results) / max(num_tokens, 1)
        has_bytes = all(result.num_bytes for result in results)
        num_bytes = sum(result.num_bytes for result in results) if has_bytes else 0
        results = [*results, Evaluation("all", loss, num_tokens, num_bytes)]
    width = max(len("source"), *(len(result.source) for result in results))
    lines = [f"{'source':{width}}  {'loss':>9}  {'perplexity':>10}  {'bits a byte':>11}  {'tokens':>12}"]
    for result in results:
        bits = "-" if result.bits_a_byte is None else f"{result.bits_a_byte:.5f}"
        numbers = f"{result.loss:9.5f}  {result.perplexity:10.5g}  {bits:>11}  {result.num_tokens:12,}"
        lines.append(f"{result.source:{width}}  {numbers}")
    return lines


def is_first_rank() -> bool:
    """Whether this process speaks for all, also when its process group has ended."""
    return os.environ.get("RANK", "0") == "0"


def _loader(recipe: Recipe, use: Loaded, group: dist.ProcessGroup, *, held_out: bool, all_sequences: bool) -> Loader:
    meshes = use.meshes
    where = meshes.data_rank, meshes.sizes.dp, recipe.run.folder, partial(dist.barrier, group)
    options: dict[str, Any] = {"builds_cache": is_first_of_node()}
    options["open_"] = open_source if held_out else open_for_evaluation
    shard = sequence_shard(recipe.parallel, meshes.context_rank)
    if recipe.data.streams or recipe.validation.has_own_data:  # which are opened for validations alone
        recipe = replace(recipe, validation=replace(recipe.validation, every_steps=1))
    try:
        loader = build_loader(recipe, *where, shard, **options)
        if all_sequences and loader.num_held_out:
            number = replace(recipe.validation, num_sequences=loader.num_held_out)
            loader = build_loader(replace(recipe, validation=number), *where, shard, **options)
        return loader
    except (ValueError, OSError, ImportError) as error:
        raise RecipeError([str(error)]) from error


def _counting(loader: Loader, name: str, shard: Any, num_bytes: Tensor) -> Iterator[Batch]:
    """This rank's held-out batches of a set, with the bytes of their labels added up."""
    for batch in loader.held_out_batches(name):
        for labels in batch.labels_MBN.flatten(0, 1).tolist():
            num_bytes += loader.tokenizer.count_bytes([token for token in labels if token != IGNORE_LABEL])
        yield batch.shard(shard)
