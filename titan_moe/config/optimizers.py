"""Facts about optimizers for rules and plan, without torch; optim/build.py builds them."""

from dataclasses import dataclass

MUON_BUCKET_ELEMENTS = 1 << 27
"""Elements of the shards that Muon updates together, a quarter of a GiB in bf16; a larger matrix comes alone."""

EMA = "ema"
"""The state of a parameter that is the average of its weights."""


@dataclass(frozen=True)
class OptimizerFacts:
    """What an optimizer supports and costs."""

    has_own_moments: bool  # moments may be in another dtype than the parameters
    has_8bit_moments: bool  # and in fp8
    orthogonalises: bool  # matrices have one momentum, which goes through Newton-Schulz
    takes_fp64_on_gpus: bool  # supports fp64 parameters on GPUs; on CPUs each kind does
    clips_as_it_reads: bool  # clipping needs no separate pass over the gradients
    has_own_gradients: bool  # gradients may be in another dtype than the parameters, and masters in two parts
    parks: bool  # states may rest on the host
    rounds_stochastically: bool  # small updates of bf16 weights are kept in expectation


OPTIMIZERS = {
    "adamw": OptimizerFacts(
        has_own_moments=False,
        has_8bit_moments=False,
        orthogonalises=False,
        takes_fp64_on_gpus=True,
        clips_as_it_reads=False,
        has_own_gradients=False,
        parks=False,
        rounds_stochastically=False,
    ),
    "fused_adamw": OptimizerFacts(
        has_own_moments=True,
        has_8bit_moments=True,
        orthogonalises=False,
        takes_fp64_on_gpus=False,
        clips_as_it_reads=True,
        has_own_gradients=True,
        parks=True,
        rounds_stochastically=True,
    ),
    "muon": OptimizerFacts(
        has_own_moments=True,
        has_8bit_moments=False,
        orthogonalises=True,
        takes_fp64_on_gpus=False,
        clips_as_it_reads=True,
        has_own_gradients=True,
        parks=False,
        rounds_stochastically=False,
    ),
}
"""By `optim.kind`."""
