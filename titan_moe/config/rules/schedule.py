"""Rules of schedules: of the learning rate, and of the batch size."""

from titan_moe.config.rules.rule import row, rules_in

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

SCHEDULE_RULES = rules_in(globals())
