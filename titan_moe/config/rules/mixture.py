"""Rules of mixtures: the sources, their weights, and what each source needs for itself."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from titan_moe.config.mixture import of_source
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, row, rule, rules_in
from titan_moe.config.rules.run import SET_NAME, SOURCE_RULES
from titan_moe.config.schema import in_toml, shown

mixture_is_read = row(
    "only this source reads the tables [[data.mixture]]",
    lambda r: r.data.source != "mixture" and (r.data.mixture or r.data.mixture_temperature > 0),
    '{data.mixture} and {data.mixture_temperature} belong to data.source = "mixture", not {data.source}',
)
mixture_has_sources = row(
    "a mixture reads its sources",
    lambda r: r.data.source == "mixture" and not r.data.mixture,
    "{data.mixture} leaves {data.source} nothing to read",
    "data.source",
    hint="a table [[data.mixture]] with path and weight for each source",
)
mixture_has_no_path = row(
    "each source of a mixture has its own",
    lambda r: r.data.source == "mixture" and r.data.path,
    "{data.path} is not read with {data.source}",
)
temperature_replaces_weights = row(
    "the temperature makes weights of the sizes",
    lambda r: r.data.mixture_temperature > 0 and any(source.weight != 1 for source in r.data.mixture),
    "{data.mixture_temperature} and weights of {data.mixture} both give shares",
    "data.mixture_temperature",
    hint="no `weight` in [[data.mixture]]",
)

temperature_needs_sizes = row(
    "the size of a stream is unknown",
    lambda r: r.data.mixture_temperature > 0 and r.data.mixes_streams,
    "{data.mixture_temperature} makes shares of sizes, and a source of {data.mixture} is streamed",
    "data.mixture_temperature",
    hint="a `weight` for each source",
)
streams_of_a_mixture_hold_out_no_share = row(
    "the length of a stream is unknown, so no fraction of it can be held out",
    lambda r: r.data.mixes_streams and r.data.holdout_fraction > 0,
    "{data.holdout_fraction} is of all sources, and one of {data.mixture} is streamed",
    "data.holdout_fraction",
    hint="data.holdout_fraction = 0 with validation.path, data of its own",
)


@rule("a share is a weight over the sum of all", "data.mixture")
def weights_give_shares(recipe: Recipe, world_size: int) -> Iterator[str]:
    mixture = recipe.data.mixture
    for number, source in enumerate(mixture):
        if not (source.weight >= 0 and math.isfinite(source.weight)):
            yield Problem(
                f"data.mixture[{number}].weight = {shown(source.weight)} must be finite and at least 0",
                hint="a weight of 0 or more",
            )
    if mixture and not any(source.weight > 0 for source in mixture):
        yield Problem("data.mixture has only weights of 0", hint="a weight above 0")


@rule("logs, metrics and a resume know a source by its name", "data.mixture")
def sources_have_plain_names(recipe: Recipe, world_size: int) -> Iterator[str]:
    names = Counter(source.label for source in recipe.data.mixture)
    for number, source in enumerate(recipe.data.mixture):
        which = f"data.mixture[{number}]"
        if not source.path:
            yield Problem(f'{which}.path = "" names no data', hint=f"{which}.path = a path")
        elif not SET_NAME.fullmatch(source.label):
            words = f"{which} has the name {in_toml(source.label)}"
            yield Problem(words, hint=f"{which}.name = a name of letters, digits, -, _ and .")
        elif names[source.label] > 1:
            yield Problem(f"{which} has the name {in_toml(source.label)} of another source", hint=f"{which}.name")


@rule("each source is read as if it were alone", "data.mixture")
def sources_can_be_read(recipe: Recipe, world_size: int) -> Iterator[str]:
    for name, data in recipe.data.by_source().items() if recipe.data.source == "mixture" else ():
        for rule_of_source in SOURCE_RULES if data.path else ():
            for breach in rule_of_source.breaches(replace(recipe, data=data), world_size):
                yield Problem(of_source(name, f"{breach.problem}: {breach.rule.why}"), hint=breach.problem.hint)


MIXTURE_RULES = rules_in(globals())
