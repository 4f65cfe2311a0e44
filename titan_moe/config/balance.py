"""Load balancing: `[model.moe.aux_losses]`, a coefficient for each kind of auxiliary loss."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AuxLosses:
    """Coefficients of the load-balancing losses, by the tokens over which each takes an expert's load and its mean
    share of the scores: `coef * E * sum of load_i * share_i` (arXiv:2101.03961). Several are added up; 0 disables one.
    The wider the tokens, the less a loss forbids experts to specialise in domains (arXiv:2501.11873)."""

    sequence: float = 0.0
    """Of each sequence (arXiv:2412.19437 section 2.1.2; Megatron's `seq_aux_loss`). `model.moe.aux_loss_coef` is the
    same."""
    microbatch: float = 0.0
    """Of all sequences of a microbatch of a data-parallel rank, whose ranks of cp and tp have parts of them (Megatron's
    `aux_loss`). It depends on `train.micro_batch_sequences` and on dp, as the microbatches do."""
    global_batch: float = 0.0
    """Of all sequences of an optimizer step (Megatron's `global_aux_loss`, arXiv:2501.11873). The loads are those of
    the whole step, on every layout. With one microbatch, ranks sum them in the forward of each layer. With several, or
    a repeated layer of multi-token prediction, a step first runs all of them without gradients and without the head to
    count, which costs about a quarter to a third of the step. In a pipeline that run goes from stage to stage, however
    the schedule interleaves them: with several stages on a rank they wait for each other, and it costs more."""

    @property
    def are_used(self) -> bool:
        """Whether any is not 0."""
        return any((self.sequence, self.microbatch, self.global_batch))
