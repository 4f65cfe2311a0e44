"""Rules of multi-token prediction."""

from titan_moe.config.arena import experts_of, has_arena
from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.rule import row, rules_in


def _repeats(recipe: Recipe) -> bool:
    return recipe.model.mtp.num_uses > 1


depths_are_in_the_sequence = row(
    "a depth predicts a token so many places behind the next one, which a shorter sequence has not",
    lambda r: r.model.mtp.num_depths > 0 and r.model.mtp.num_depths >= r.train.seq_len_tokens,
    "{model.mtp.num_depths} needs sequences of more tokens than {train.seq_len_tokens}",
)
mtp_is_of_the_default_class = row(
    "a class of your own has a forward of its own, which leaves out the blocks of multi-token prediction",
    lambda r: r.model.mtp.num_depths > 0 and r.model.class_ != ModelConfig.class_,
    "{model.mtp.num_depths} is built for the default class alone, not for {model.class}",
)
mtp_has_no_adapters = row(
    "PEFT's files have no names for adapters in blocks of multi-token prediction",
    lambda r: r.model.mtp.num_depths > 0 and r.model.adapter.is_used,
    "{model.mtp.num_depths} trains no adapters, as {model.adapter.rank} asks for",
)
mtp_is_in_no_pieces = row(
    "blocks of multi-token prediction are not cut into pieces, between which another microbatch could run",
    lambda r: r.model.mtp.num_depths > 0 and r.parallel.overlap == "microbatch",
    "{model.mtp.num_depths} cannot be interleaved by {parallel.overlap}",
)
repeated_layer_has_no_clones = row(
    "replica slots hold the experts of a layer from its forward to its backward, for one forward a microbatch",
    lambda r: _repeats(r) and r.parallel.expert_clones != "off",
    "{model.mtp.repeats_layer} applies a block {=model.mtp.num_depths} times, which "
    "{parallel.expert_clones} has clones for once",
)
repeated_layer_has_no_arena = row(
    "an arena has space for each layer once a microbatch",
    lambda r: _repeats(r) and has_arena(r, experts_of(r)),
    "{model.mtp.repeats_layer} applies a block {=model.mtp.num_depths} times, and the rows that "
    "{parallel.dispatcher} keeps in an arena are of one forward",
    "model.mtp.repeats_layer model.mtp.num_depths parallel.dispatcher perf.override.experts",
)


MTP_RULES = rules_in(globals())
