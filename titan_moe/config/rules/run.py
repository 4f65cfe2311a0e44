"""Rules of the run around the model: schedule, data, validation, checkpoints, reports."""

import re
from collections.abc import Iterator

from titan_moe.config.chat import ChatConfig
from titan_moe.config.data_files import kind_of_name
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, row, rule, rules_in, said
from titan_moe.config.run_length import given, known_steps
from titan_moe.config.schema import in_toml
from titan_moe.config.train import DataConfig

BYTES_VOCABULARY = 256
SET_NAME = re.compile(r"[\w.-]+")
PATHS = {
    "auto": "a file, a glob, a folder, or a hub name",
    "text": 'a glob of files, or "python-stdlib"',
    "tokens": "a glob of binary files",
}
"""Of a source, in words; of the others a hub name, a folder, or a file type beside `data.files`."""


def _reads_text(recipe: Recipe) -> bool:
    d = recipe.data
    return d.source in ("text", "datasets") or (d.source == "auto" and kind_of_name(d.path) not in ("tokens", ""))


folder_is_named = row(
    "a run writes all of its files into this folder", lambda r: not r.run.folder.strip(), "{run.folder} names no folder"
)


@rule("only synthetic data needs no files", "data.source")
def source_has_a_path(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    if d.source not in ("synthetic", "mixture") and not d.path:
        path = PATHS.get(d.source, "a hub name, a folder, or a file type beside data.files")
        problem = f'data.path = "" leaves data.source = "{d.source}" nothing to read'
        yield Problem(problem, hint=f"data.path = {path}")


@rule("other sources ignore this field", "data.source files subset split is_streamed")
def datasets_options_need_datasets(recipe: Recipe, world_size: int) -> Iterator[str]:
    d = recipe.data
    of_auto = ("subset", "split", "is_streamed") if d.source == "auto" else ()
    for key in ("files", "subset", "split", "is_streamed"):
        is_set = getattr(d, key) != getattr(DataConfig, key)
        sources = 'data.source = "datasets"' + ("" if key == "files" else ' or "auto"')
        if d.source != "datasets" and key not in of_auto and is_set:
            hint = f"{key} in each [[data.mixture]]" if d.source == "mixture" else ""
            problem = f'data.{key} = {in_toml(getattr(d, key))} belongs to {sources}, not "{d.source}"'
            yield Problem(problem, hint=hint)


bytes_fit_the_vocabulary = row(
    "a larger id has no row in the embedding",
    lambda r: _reads_text(r) and r.data.tokenizer == "bytes" and r.model.vocab_size < BYTES_VOCABULARY,
    f"{{model.vocab_size}} is below the {BYTES_VOCABULARY} ids of {{data.tokenizer}}",
    "model.vocab_size",
    steps=lambda r: [BYTES_VOCABULARY],
)
text_has_a_tokenizer = row(
    "the tokenizer turns text into token ids",
    lambda r: _reads_text(r) and not r.data.tokenizer,
    "{data.tokenizer} names no tokenizer",
    hint="a folder with a tokenizer.json",
)
conversations_are_rows = row(
    "conversations are rows of JSON lines, tables, or data sets of the hub",
    lambda r: r.data.format == "chat" and r.data.source not in ("auto", "datasets", "mixture"),
    "{data.format} cannot be read from {data.source}",
)
validation_is_of_conversations_too = row(
    "a run on conversations validates on conversations, which are rows",
    lambda r: r.data.format == "chat" and r.validation.has_own_data and r.validation.source in ("text", "tokens"),
    "{validation.source} has no conversations for {data.format}",
    "validation.source data.format",
)
validation_text_has_a_tokenizer = row(
    "the tokenizer turns text into token ids",
    lambda r: r.validation.has_own_data and r.validation.source in ("text", "datasets") and not r.data.tokenizer,
    "{validation.source} is text, but {data.tokenizer} names no tokenizer",
    "validation.source data.tokenizer",
    hint="data.tokenizer = a folder with a tokenizer.json",
)
conversations_have_a_tokenizer_folder = row(
    "a chat template belongs to a tokenizer of Hugging Face",
    lambda r: r.data.format == "chat" and r.data.tokenizer in ("", "bytes"),
    "{data.format} has no template in {data.tokenizer}",
    "data.tokenizer data.format",
    hint="data.tokenizer = a folder with a tokenizer.json",
)
conversations_are_kept_apart = row(
    "conversations that are packed into one sequence do not see each other",
    lambda r: r.data.format == "chat" and not r.data.document_attention,
    "{data.format} shows conversations to each other with {data.document_attention}",
    "data.document_attention data.format",
)


@rule("other data has no conversations", "data.format data.chat.template answers train_on too_long")
def chat_options_need_conversations(recipe: Recipe, world_size: int) -> Iterator[str]:
    chat, default = recipe.data.chat, ChatConfig()
    has_chats = any(data.format == "chat" for data in recipe.data.by_source().values())
    for key in ("template", "answers", "train_on", "too_long"):
        if not has_chats and getattr(chat, key) != getattr(default, key):
            yield f'data.chat.{key} = {in_toml(getattr(chat, key))} belongs to data.format = "chat"'


SOURCE_RULES = [
    datasets_options_need_datasets,
    bytes_fit_the_vocabulary,
    text_has_a_tokenizer,
    conversations_are_rows,
    conversations_have_a_tokenizer_folder,
    conversations_are_kept_apart,
]
"""What a source needs, which holds for each source of a mixture too."""
streams_hold_out_no_share = row(
    "the length of a stream is unknown, so no fraction of it can be held out",
    lambda r: r.data.streams and r.data.holdout_fraction > 0,
    "{data.holdout_fraction} cannot be taken from {data.is_streamed}",
)
synthetic_data_holds_out_no_share = row(
    "synthetic data draws validation sequences of its own",
    lambda r: r.data.source == "synthetic" and r.data.holdout_fraction > 0,
    "{data.holdout_fraction} has no effect with {data.source}",
)
validation_has_data = row(
    "validation needs text that training does not see",
    lambda r: (
        r.validation.every_steps > 0
        and r.data.source != "synthetic"
        and not r.data.is_streamed
        and not r.validation.has_own_data
        and r.data.holdout_fraction == 0
    ),
    "{validation.every_steps} needs documents that training does not see, but {data.holdout_fraction}",
    "data.holdout_fraction validation.every_steps path",
)
own_validation_leaves_nothing_held_out = row(
    "validation_loss is that of the path, so what is held out would be trained on by nothing and read by nothing",
    lambda r: r.validation.path and r.data.holdout_fraction > 0,
    "{validation.path} and {data.holdout_fraction} both give data for validation_loss",
    "data.holdout_fraction validation.path",
)
synthetic_data_validates_itself = row(
    "a model of synthetic ids knows no other data",
    lambda r: r.data.source == "synthetic" and r.validation.has_own_data,
    "{data.source} has no tokens in common with {validation.path} and {validation.sets}",
)


@rule("the name is part of the metric validation_loss/NAME", "validation.sets")
def sets_have_plain_names(recipe: Recipe, world_size: int) -> Iterator[str]:
    for name, path in recipe.validation.sets.items():
        if not SET_NAME.fullmatch(name):
            yield Problem(f"validation.sets has the name {in_toml(name)}", hint="a name of letters, digits, -, _ and .")
        if not path:
            yield Problem(f'validation.sets.{name} = "" names no data', hint=f"validation.sets.{name} = a path")


sample_has_a_tokenizer = row(
    "the tokenizer turns token ids into text",
    lambda r: r.metrics.sample_tokens > 0 and not r.data.tokenizer,
    "{metrics.sample_tokens} cannot be read with {data.tokenizer}",
    hint="data.tokenizer of the ids",
)


@rule("the model continues a held-out prompt", "metrics.sample_tokens data.source holdout_fraction")
def sample_has_a_prompt(recipe: Recipe, world_size: int) -> Iterator[str]:
    d, is_asked = recipe.data, recipe.metrics.sample_tokens > 0
    if is_asked and d.source == "synthetic":
        yield said(recipe, "{metrics.sample_tokens} needs held-out text, but {data.source} has none")
    elif is_asked and d.holdout_fraction == 0 and not d.is_streamed and not recipe.validation.has_own_data:
        yield said(recipe, "{metrics.sample_tokens} needs held-out text, but {data.holdout_fraction}")


two_checkpoints_are_kept = row(
    "one complete checkpoint must remain while the next one is written",
    lambda r: r.checkpoint.keep_latest == 1,
    "{checkpoint.keep_latest} is too few; 0 keeps all",
)
best_needs_a_validation = row(
    "the best checkpoint is the one with the lowest validation loss",
    lambda r: r.checkpoint.keep_best and r.validation.every_steps == 0,
    "{checkpoint.keep_best} compares losses, but {validation.every_steps} has none",
    steps=lambda r: [max(r.checkpoint.every_steps, 1)],
)
best_is_validated_where_it_is_saved = row(
    "a checkpoint without a validation after its step is never the best one",
    lambda r: (
        r.checkpoint.keep_best
        and r.validation.every_steps > 0
        and r.checkpoint.every_steps % r.validation.every_steps > 0
    ),
    "{validation.every_steps} does not divide {checkpoint.every_steps}, and {checkpoint.keep_best} compares losses",
    steps=lambda r: [r.checkpoint.every_steps],
)
kept_steps_are_saved = row(
    "only steps that are saved can be kept",
    lambda r: (
        r.checkpoint.keep_every_steps > 0
        and (r.checkpoint.every_steps == 0 or r.checkpoint.keep_every_steps % r.checkpoint.every_steps > 0)
    ),
    "{checkpoint.keep_every_steps} is no multiple of {checkpoint.every_steps}",
    steps=lambda r: [r.checkpoint.keep_every_steps],
)


one_length_is_given = row(
    "each of them says how long the run is",
    lambda r: len(given(r.train)) > 1,
    "{train.steps}, {train.tokens} and {train.epochs} are not all left at their defaults but one",
    "train.steps tokens epochs",
)
epochs_have_an_end = row(
    "random ids and streams have no known size, and each source of a mixture has epochs of its own",
    lambda r: r.train.epochs > 0 and (r.data.streams or r.data.source in ("synthetic", "mixture")),
    "{train.epochs} cannot be counted with {data.source} and {data.is_streamed}",
    "train.epochs data.is_streamed",
)


@rule("a trace is written when its last step ends", "profile.start_step num_steps train.steps")
def trace_ends_in_the_run(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, steps = recipe.profile, known_steps(recipe.train)
    last_step = p.start_step + p.num_steps - 1
    if p.start_step > 0 and steps is not None and last_step > steps:
        problem = f"profile.start_step + num_steps ends at step {last_step}, after train.steps = {steps}"
        yield Problem(problem, steps=[max(steps - p.num_steps + 1, 1)])


longrope_covers_the_sequences = row(
    "the divisors of short contexts are for those before LongRoPE's extension",
    lambda r: (
        r.model.attention.longrope_short_factor
        and r.model.attention.longrope_applies == "short"
        and r.train.seq_len_tokens > r.model.attention.longrope_original_tokens
    ),
    "{train.seq_len_tokens} exceeds {model.attention.longrope_original_tokens} with {model.attention.longrope_applies}",
    "model.attention.longrope_applies longrope_original_tokens train.seq_len_tokens",
)


RUN_RULES = rules_in(globals())
