"""Rules of pipeline parallelism: stages, microbatches, and settings that it does not support."""

from collections.abc import Iterator

from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.pipeline_layout import parse_layout
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import Problem, data_parallel_ranks, product, row, rule, rules_in, said
from titan_moe.config.schema import counted, in_toml


@rule("an option without effect hides a mistake", "parallel.pp pp_schedule vpp pp_layout")
def pipeline_options_need_pp(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.pp == 1:
        for key in ("pp_schedule", "vpp", "pp_layout"):
            if (value := getattr(p, key)) != getattr(ParallelConfig, key):
                yield f"parallel.{key} = {in_toml(value)} needs a pipeline, but parallel.pp = 1"


vpp_fits_the_schedule = row(
    "each schedule requires its number of stages on a rank",
    lambda r: r.parallel.pp > 1 and not SCHEDULES[r.parallel.pp_schedule].fits_vpp(r.parallel.vpp),
    "{parallel.vpp} does not fit {parallel.pp_schedule}",
)


@rule("a stage without layers leaves more layers to the others", "parallel.vpp pp pp_schedule model.num_layers")
def stages_have_layers(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_layers = recipe.parallel, recipe.model.num_layers
    number, words = product(recipe, "pp vpp")
    if p.pp > 1 and not p.pp_layout and number > num_layers:
        problem = f"{words} stages are more than model.num_layers = {num_layers}"
        yield Problem(problem, steps=[number], hint="parallel.pp_layout, which may leave some stages empty")


@rule(
    "every layer is on one stage, in the order of the model",
    "parallel.pp_layout pp vpp model.num_layers model.mtp.num_depths repeats_layer",
)
def layout_fits_the_model(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.pp > 1 and p.pp_layout:
        try:
            stages = parse_layout(p.pp_layout, recipe.model.num_layers, p.pp * p.vpp, recipe.model.mtp.num_layers)
        except ValueError as error:
            yield f'parallel.pp_layout = "{p.pp_layout}": {error}'
            return
        ranks_with_modules = {
            SCHEDULES[p.pp_schedule].rank_of(stage, p.pp) for stage, held in enumerate(stages) if held
        }
        if idle := sorted(set(range(p.pp)) - ranks_with_modules):
            yield f'parallel.pp_layout = "{p.pp_layout}" leaves pipeline rank {idle[0]} without modules'


@rule(
    "a rank without a microbatch waits, and the order of a schedule exists only for some numbers of microbatches",
    "train.global_batch_sequences micro_batch_sequences parallel.pp_schedule pp",
)
def microbatches_fill_the_pipeline(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, facts, batch = recipe.parallel, SCHEDULES[recipe.parallel.pp_schedule], recipe.train.global_batch_sequences
    of_one = recipe.train.micro_batch_sequences * data_parallel_ranks(recipe, world_size)
    if p.pp <= 1 or of_one < 1 or batch % of_one:
        return  # another rule refuses it
    number, fewest = batch // of_one, max(p.pp, facts.fewest_microbatches(p.pp))
    says = f"{{train.global_batch_sequences}} makes {counted(number, 'microbatch', 'es')} a step, but"
    found = said(recipe, f"{says} {{parallel.pp_schedule}}")
    if number < fewest:
        yield Problem(f"{found} with pp = {p.pp} needs {fewest} or more", steps=[fewest * of_one])
    elif facts.rounds and number % p.pp:
        yield Problem(f"{found} needs a multiple of pp = {p.pp}", steps=[p.pp * of_one])


@rule(
    "a split backward computes weight gradients later, as separate operations",
    "parallel.pp_schedule accumulate_unsharded",
)
def split_backwards_are_possible(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.pp <= 1 or not SCHEDULES[p.pp_schedule].splits_backward:
        return
    if not p.accumulate_unsharded:
        reduces = "reduces gradients after the last weight gradient"
        yield said(recipe, f"{{parallel.pp_schedule}} {reduces}, which needs parallel.accumulate_unsharded = true")


interleaved_pipeline_has_pairs = row(
    "a pair waits for two inputs and sends both results at its end, so most orders of actions would deadlock",
    lambda r: (
        r.parallel.pp > 1 and r.parallel.overlap == "microbatch" and not SCHEDULES[r.parallel.pp_schedule].has_pairs
    ),
    "{parallel.overlap} runs a forward and a backward of a pipeline rank as a pair, but {parallel.pp_schedule} has no "
    "pairs",
    "parallel.pp_schedule overlap",
)


PIPELINE_RULES = rules_in(globals())
