"""Rules of the run around the model: schedule, data, validation, checkpoints, reports."""

from collections.abc import Iterator

from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import rule, rules_in

BYTES_VOCABULARY = 256


@rule("a run writes all of its files into this folder")
def folder_is_named(recipe: Recipe, world_size: int) -> Iterator[str]:
    if not recipe.run.folder.strip():
        yield 'run.folder = "" names no folder; take one such as "runs/my_run"'


@rule("only synthetic data needs no files")
def source_has_a_path(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    ways_out = {"text": 'a glob of files, or "python-stdlib"', "tokens": "a glob of binary files"}
    if d.source != "synthetic" and not d.path:
        way_out = ways_out.get(d.source, "a hub name, a folder, or a file type beside data.files")
        yield f'data.path = "" leaves data.source = "{d.source}" nothing to read; give it {way_out}'


@rule("other sources ignore this field")
def datasets_options_need_datasets(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    for key in ("files", "subset"):
        if d.source != "datasets" and getattr(d, key):
            yield f'data.{key} = "{getattr(d, key)}" belongs to data.source = "datasets", not "{d.source}"; drop it'
    if d.source != "datasets" and d.is_streamed:
        yield f'data.is_streamed = true belongs to data.source = "datasets", not to "{d.source}"; set it to false'


@rule("a larger id has no row in the embedding")
def bytes_fit_the_vocabulary(recipe: Recipe, world_size: int) -> Iterator[str]:
    d, vocab_size = recipe.data, recipe.model.vocab_size
    if d.source in ("text", "datasets") and d.tokenizer == "bytes" and vocab_size < BYTES_VOCABULARY:
        yield (
            f'model.vocab_size = {vocab_size} is below the {BYTES_VOCABULARY} ids of data.tokenizer = "bytes"; '
            f"take {BYTES_VOCABULARY}"
        )


@rule("the tokenizer turns text into token ids")
def text_has_a_tokenizer(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.data.source in ("text", "datasets") and not recipe.data.tokenizer:
        yield 'data.tokenizer = "" names no tokenizer; take "bytes" or a folder with a tokenizer.json'


@rule("the length of a stream is unknown, so no fraction of it can be held out")
def streams_hold_out_no_share(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    if d.source == "datasets" and d.is_streamed and d.holdout_fraction > 0:
        yield (
            f"data.holdout_fraction = {d.holdout_fraction:g} cannot be taken from data.is_streamed = true; set it to 0 "
            "(a validation then keeps the stream's first documents), or is_streamed = false"
        )


@rule("synthetic data draws validation sequences of its own")
def synthetic_data_holds_out_no_share(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    if d.source == "synthetic" and d.holdout_fraction > 0:
        share = f"data.holdout_fraction = {d.holdout_fraction:g}"
        yield f'{share} has no effect with data.source = "synthetic"; set it to 0'


@rule("validation needs text that training does not see")
def validation_has_data(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    holds_out = d.source == "synthetic" or d.is_streamed or d.holdout_fraction != 0
    if recipe.validation.every_steps > 0 and not holds_out:
        yield (
            f"validation.every_steps = {recipe.validation.every_steps} needs documents that training does not see, but "
            "data.holdout_fraction = 0; set it to 0.01, or every_steps = 0"
        )


@rule("the tokenizer turns token ids into text")
def sample_has_a_tokenizer(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.metrics.sample_tokens > 0 and not recipe.data.tokenizer:
        yield (
            f'metrics.sample_tokens = {recipe.metrics.sample_tokens} cannot be read with data.tokenizer = ""; '
            "name the tokenizer of the ids, or set sample_tokens = 0"
        )


@rule("the model continues a held-out prompt")
def sample_has_a_prompt(recipe: Recipe, world_size: int) -> Iterator[str]:
    d, num_tokens = recipe.data, recipe.metrics.sample_tokens
    if num_tokens > 0 and d.source == "synthetic":
        yield (
            f'metrics.sample_tokens = {num_tokens} needs held-out text, but data.source = "synthetic" has none; set '
            "sample_tokens = 0"
        )
    elif num_tokens > 0 and d.holdout_fraction == 0 and not d.is_streamed:
        yield (
            f"metrics.sample_tokens = {num_tokens} needs held-out text, but data.holdout_fraction = 0; set it to 0.01, "
            "or sample_tokens = 0"
        )


@rule("one complete checkpoint must remain while the next one is written")
def two_checkpoints_are_kept(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.checkpoint.keep_latest == 1:
        yield "checkpoint.keep_latest = 1 is too few; take 2 or more, or 0 to keep all"


@rule("a trace is written when its last step ends")
def trace_ends_in_the_run(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, steps = recipe.profile, recipe.train.steps
    last_step = p.start_step + p.num_steps - 1
    if p.start_step > 0 and last_step > steps:
        yield (
            f"profile.start_step + num_steps ends at step {last_step}, after train.steps = {steps}; "
            "start earlier or trace fewer steps"
        )


RUN_RULES = rules_in(globals())
