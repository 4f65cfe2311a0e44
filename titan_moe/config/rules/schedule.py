"""Rules of schedules: of the learning rate, and of the batch size."""

from collections.abc import Iterator
from dataclasses import replace

from titan_moe.config.batch_schedule import BatchPhase
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.parallel import batch_divides, interleaved_microbatches_run_in_pieces
from titan_moe.config.rules.pipeline import microbatches_fill_the_pipeline
from titan_moe.config.rules.rule import Problem, row, rule, rules_in

OF_A_BATCH = (batch_divides, microbatches_fill_the_pipeline, interleaved_microbatches_run_in_pieces)
"""Rules that a batch of any size keeps."""

decays_end_in_order = row(
    "each period of a schedule follows the one before",
    lambda r: any(end <= before for before, end in zip((0, *r.optim.decay_ends), r.optim.decay_ends, strict=False)),
    "{optim.decay_ends} must be steps in rising order, the first above 0",
    hint="optim.decay_ends in rising order",
)
restarts_follow_a_decay = row(
    "without a decay there is no rate to come back from",
    lambda r: bool(r.optim.decay_ends) and r.optim.decay_steps == 0,
    "{optim.decay_ends} with {optim.decay_steps}",
    steps=lambda r: [min(r.optim.decay_ends)],
)
restarts_have_an_end = row(
    "it is the warm-up after each of these steps",
    lambda r: r.optim.restart_warmup_steps > 0 and not r.optim.decay_ends,
    "{optim.restart_warmup_steps} with {optim.decay_ends}",
    "optim.restart_warmup_steps decay_ends",
)


@rule("steps of all sizes are taken on the same ranks", "train.batch_schedule")
def batches_grow(recipe: Recipe, world_size: int) -> Iterator[str]:
    train, before = recipe.train, BatchPhase()
    for number, phase in enumerate(train.batch_schedule):
        key, size = f"train.batch_schedule[{number}]", phase.global_batch_sequences
        if phase.until_tokens <= before.until_tokens:
            words = f"{key}.until_tokens = {phase.until_tokens} must be above {before.until_tokens}"
            yield Problem(words, hint="tables in the order of the run")
        if not before.global_batch_sequences < size < train.global_batch_sequences:
            low, high = before.global_batch_sequences, train.global_batch_sequences
            words = f"{key}.global_batch_sequences = {size} must be above {low} and below {high}"
            yield Problem(words, hint="sizes that grow to train.global_batch_sequences")
            return
        early = replace(recipe, train=replace(train, global_batch_sequences=size, batch_schedule=()))
        for of_batch in (each for each in OF_A_BATCH if not any(each.check(recipe, world_size))):
            for problem in of_batch.check(early, world_size):
                yield Problem(f"{key}: {problem}: {of_batch.why}", hint=f"another {key}.global_batch_sequences")
        before = phase


SCHEDULE_RULES = rules_in(globals())
