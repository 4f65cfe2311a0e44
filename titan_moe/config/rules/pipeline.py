"""Rules of pipeline parallelism: stages, microbatches, and settings that it does not support."""

from collections.abc import Iterator

from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.pipeline_layout import parse_layout
from titan_moe.config.pipeline_schedules import SCHEDULES, ScheduleFacts, schedules_that
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import nearest_multiples, rule, rules_in

WHOLE_BACKWARDS = schedules_that(lambda facts: not facts.splits_backward)


@rule("an option without effect hides a mistake")
def pipeline_options_need_pp(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.pp == 1:
        for key in ("pp_schedule", "vpp", "pp_layout"):
            value, default = getattr(p, key), getattr(ParallelConfig, key)
            if value != default:
                said, plain = (f'"{word}"' if isinstance(word, str) else word for word in (value, default))
                yield f"parallel.{key} = {said} needs a pipeline, but parallel.pp = 1; raise pp, or set it to {plain}"


@rule("each schedule requires its number of stages on a rank")
def vpp_fits_the_schedule(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, facts = recipe.parallel, SCHEDULES[recipe.parallel.pp_schedule]
    if p.pp > 1 and not facts.min_vpp <= p.vpp <= facts.max_vpp:
        take = f"{facts.min_vpp}" if facts.min_vpp == facts.max_vpp else f"{facts.min_vpp} or more"
        others = schedules_that(lambda other: other.min_vpp <= p.vpp <= other.max_vpp)
        way_out = f", or {others}" if others else ""
        yield f'parallel.vpp = {p.vpp} does not fit parallel.pp_schedule = "{p.pp_schedule}"; take {take}{way_out}'


@rule("a stage without layers leaves more layers to the others")
def stages_have_layers(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_layers = recipe.parallel, recipe.model.num_layers
    if p.pp > 1 and not p.pp_layout and p.pp * p.vpp > num_layers:
        yield (
            f"parallel.pp * vpp = {p.pp} * {p.vpp} = {p.pp * p.vpp} stages are more than model.num_layers = "
            f"{num_layers}; take fewer, or define the stages with parallel.pp_layout, where some may be empty"
        )


@rule("every layer is on one stage, in the order of the model")
def layout_fits_the_model(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.pp > 1 and p.pp_layout:
        try:
            stages = parse_layout(p.pp_layout, recipe.model.num_layers, p.pp * p.vpp)
        except ValueError as error:
            yield f'parallel.pp_layout = "{p.pp_layout}": {error}; "" divides the layers by their FLOPs'
            return
        ranks_with_modules = {
            SCHEDULES[p.pp_schedule].rank_of(stage, p.pp) for stage, held in enumerate(stages) if held
        }
        if idle := sorted(set(range(p.pp)) - ranks_with_modules):
            yield (
                f'parallel.pp_layout = "{p.pp_layout}" leaves pipeline rank {idle[0]} without modules; give one of its '
                "stages a layer, or take fewer ranks"
            )


@rule("a rank without a microbatch waits, and the order of a schedule exists only for some numbers of microbatches")
def microbatches_fill_the_pipeline(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, train, facts = recipe.parallel, recipe.train, SCHEDULES[recipe.parallel.pp_schedule]
    of_one = train.micro_batch_sequences * (world_size // max(p.pp * p.cp * p.tp, 1))
    if p.pp <= 1 or of_one < 1 or train.global_batch_sequences % of_one:
        return  # another rule refuses it
    number, fewest = train.global_batch_sequences // of_one, max(p.pp, facts.fewest_microbatches(p.pp))
    microbatches = "1 microbatch" if number == 1 else f"{number} microbatches"
    found = f"train.global_batch_sequences = {train.global_batch_sequences} makes {microbatches} a step"
    if number < fewest:
        yield (
            f'{found}, but parallel.pp_schedule = "{p.pp_schedule}" with pp = {p.pp} needs {fewest} or more; take '
            f"{fewest * of_one} sequences, or fewer train.micro_batch_sequences{_others(facts, p.pp, number)}"
        )
    elif facts.rounds and number % p.pp:
        sequences = nearest_multiples(train.global_batch_sequences, p.pp * of_one)
        yield (
            f'{found}, but parallel.pp_schedule = "{p.pp_schedule}" needs a multiple of pp = {p.pp}; take '
            f"{sequences} sequences{_others(facts, p.pp, number)}"
        )


def _others(facts: ScheduleFacts, pp: int, number: int) -> str:
    """The schedules that this number of microbatches fits."""
    others = schedules_that(lambda other: max(pp, other.fewest_microbatches(pp)) <= number and not other.rounds)
    return f", or pp_schedule = {others}" if others else ""


@rule("a split backward computes weight gradients later, as separate operations")
def split_backwards_are_possible(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.pp <= 1 or not SCHEDULES[p.pp_schedule].splits_backward:
        return
    setting, way_out = f'parallel.pp_schedule = "{p.pp_schedule}"', f"pp_schedule = {WHOLE_BACKWARDS}"
    if recipe.memory.recompute != "none":
        yield (
            f"{setting} splits backwards, but memory.recompute = "
            f'"{recipe.memory.recompute}" needs whole ones; take "none", or {way_out}'
        )
    if not p.accumulate_unsharded:
        yield (
            f"{setting} reduces gradients after the last weight gradient; set parallel.accumulate_unsharded = true, "
            f"or take {way_out}"
        )


@rule("a pair waits for two inputs and sends both results at its end, so most orders of actions would deadlock")
def interleaved_pipeline_has_pairs(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if p.pp > 1 and p.overlap == "microbatch" and not SCHEDULES[p.pp_schedule].has_pairs:
        yield (
            'parallel.overlap = "microbatch" runs a forward and a backward of a pipeline rank as a pair, but '
            f'parallel.pp_schedule = "{p.pp_schedule}" has no pairs; take pp_schedule = '
            f'{schedules_that(lambda facts: facts.has_pairs)}, or overlap = "none"'
        )


PIPELINE_RULES = rules_in(globals())
