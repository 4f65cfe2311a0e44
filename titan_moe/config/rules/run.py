"""Rules of the run around the model: schedule, data, validation, checkpoints, reports."""

from collections.abc import Iterator

from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, rule, rules_in
from titan_moe.config.schema import in_toml

BYTES_VOCABULARY = 256
PATHS = {"text": 'a glob of files, or "python-stdlib"', "tokens": "a glob of binary files"}
"""Of a source, in words; of the others a hub name, a folder, or a file type beside `data.files`."""


@rule("a run writes all of its files into this folder", "run.folder")
def folder_is_named(recipe: Recipe, world_size: int) -> Iterator[str]:
    if not recipe.run.folder.strip():
        yield 'run.folder = "" names no folder'


@rule("only synthetic data needs no files", "data.source")
def source_has_a_path(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    if d.source != "synthetic" and not d.path:
        path = PATHS.get(d.source, "a hub name, a folder, or a file type beside data.files")
        problem = f'data.path = "" leaves data.source = "{d.source}" nothing to read'
        yield Problem(problem, hint=f"data.path = {path}")


@rule("other sources ignore this field", "data.source files subset is_streamed")
def datasets_options_need_datasets(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    for key in ("files", "subset", "is_streamed"):
        if d.source != "datasets" and getattr(d, key):
            yield f'data.{key} = {in_toml(getattr(d, key))} belongs to data.source = "datasets", not "{d.source}"'


@rule("a larger id has no row in the embedding", "model.vocab_size")
def bytes_fit_the_vocabulary(recipe: Recipe, world_size: int) -> Iterator[str]:
    d, vocab_size = recipe.data, recipe.model.vocab_size
    if d.source in ("text", "datasets") and d.tokenizer == "bytes" and vocab_size < BYTES_VOCABULARY:
        problem = f'model.vocab_size = {vocab_size} is below the {BYTES_VOCABULARY} ids of data.tokenizer = "bytes"'
        yield Problem(problem, steps=[BYTES_VOCABULARY])


@rule("the tokenizer turns text into token ids", "data.tokenizer")
def text_has_a_tokenizer(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.data.source in ("text", "datasets") and not recipe.data.tokenizer:
        yield Problem('data.tokenizer = "" names no tokenizer', hint="a folder with a tokenizer.json")


@rule("the length of a stream is unknown, so no fraction of it can be held out", "data.holdout_fraction is_streamed")
def streams_hold_out_no_share(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    if d.source == "datasets" and d.is_streamed and d.holdout_fraction > 0:
        yield f"data.holdout_fraction = {d.holdout_fraction:g} cannot be taken from data.is_streamed = true"


@rule("synthetic data draws validation sequences of its own", "data.holdout_fraction source")
def synthetic_data_holds_out_no_share(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    if d.source == "synthetic" and d.holdout_fraction > 0:
        yield f'data.holdout_fraction = {d.holdout_fraction:g} has no effect with data.source = "synthetic"'


@rule("validation needs text that training does not see", "data.holdout_fraction validation.every_steps")
def validation_has_data(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    holds_out = d.source == "synthetic" or d.is_streamed or d.holdout_fraction != 0
    if recipe.validation.every_steps > 0 and not holds_out:
        yield (
            f"validation.every_steps = {recipe.validation.every_steps} needs documents that training does not see, but "
            "data.holdout_fraction = 0"
        )


@rule("the tokenizer turns token ids into text", "metrics.sample_tokens data.tokenizer")
def sample_has_a_tokenizer(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.metrics.sample_tokens > 0 and not recipe.data.tokenizer:
        problem = f'metrics.sample_tokens = {recipe.metrics.sample_tokens} cannot be read with data.tokenizer = ""'
        yield Problem(problem, hint="data.tokenizer of the ids")


@rule("the model continues a held-out prompt", "metrics.sample_tokens data.source holdout_fraction")
def sample_has_a_prompt(recipe: Recipe, world_size: int) -> Iterator[str]:
    d, num_tokens = recipe.data, recipe.metrics.sample_tokens
    if num_tokens > 0 and d.source == "synthetic":
        yield f'metrics.sample_tokens = {num_tokens} needs held-out text, but data.source = "synthetic" has none'
    elif num_tokens > 0 and d.holdout_fraction == 0 and not d.is_streamed:
        yield f"metrics.sample_tokens = {num_tokens} needs held-out text, but data.holdout_fraction = 0"


@rule("one complete checkpoint must remain while the next one is written", "checkpoint.keep_latest")
def two_checkpoints_are_kept(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.checkpoint.keep_latest == 1:
        yield "checkpoint.keep_latest = 1 is too few; 0 keeps all"


@rule("a trace is written when its last step ends", "profile.start_step num_steps train.steps")
def trace_ends_in_the_run(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, steps = recipe.profile, recipe.train.steps
    last_step = p.start_step + p.num_steps - 1
    if p.start_step > 0 and last_step > steps:
        problem = f"profile.start_step + num_steps ends at step {last_step}, after train.steps = {steps}"
        yield Problem(problem, steps=[max(steps - p.num_steps + 1, 1)])


RUN_RULES = rules_in(globals())
