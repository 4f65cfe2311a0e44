"""Count parameters and model FLOPs of a shape, without building it, from the table of its modules.

FLOPs follow Megatron's convention, so that TFLOP/s and MFU compare with published ones: forward and backward (factor
3), two FLOPs a multiply-add, causal attention counted half, no recompute; router, norms, softmax and permutation are
not counted. With a sliding window only the tokens inside it are counted. Document masks are ignored, because document
boundaries differ by batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import ALONE, Module, Region, modules_of
from titan_moe.config.parallel import ParallelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of modules; buffers such as the balancing bias are not parameters. A tied head has none."""

    modules: tuple[Module, ...]

    def __getitem__(self, region: Region) -> int:
        """Those of one region."""
        return sum(module.number * module.parameters for module in self.modules if module.region == region)

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(module.number * module.parameters for module in self.modules)

    @property
    def active(self) -> int:
        """The parameters that one token uses, embedding and head included."""
        return self.total - sum(module.number * module.idle for module in self.modules)

    @property
    def dense_of_a_rank(self) -> float:
        """Those of a rank of tp, without routed experts."""
        return sum(module.number * module.own_parameters for module in self.modules if module.region != "experts")

    @property
    def replicated_over_tp(self) -> int:
        """The parameters that every rank of tp has: norms, routers, latent projections, biases, compressions of mla,
        gates of shared experts; and the projections to query, key and value where ranks share a key/value head."""
        return sum(module.number * module.whole for module in self.modules)


def count_parameters(model: ModelConfig, parallel: ParallelConfig = ALONE) -> ParameterCount:
    """Count the parameters of a model; those of a rank follow the layout."""
    return ParameterCount(modules_of(model, parallel))


def training_flops_per_token(model: ModelConfig, seq_len_tokens: int) -> int:
    """Count the FLOPs of training on one token of a sequence: the numerator of TFLOP/s and MFU."""
    modules = (module for module in modules_of(model) if module.region != "router")
    multiply_adds = sum(module.number * module.multiply_adds for module in modules)
    return 6 * multiply_adds + attention_core_flops_per_token(model, seq_len_tokens)


def attention_core_flops_per_token(model: ModelConfig, seq_len_tokens: int, layers: Iterable[int] | None = None) -> int:
    """Count the FLOPs of QK^T and PV in some layers, by default in all, training, on one token of a sequence.

    A token attends to N / 2 of N tokens on average; with a window W to W - W² / 2N, with a chunk C
    that divides N to C / 2.
    """
    cores = [module for module in modules_of(model) if module.pair_width]
    doubled = 0
    for layer in range(model.num_layers) if layers is None else layers:
        pair_width = sum(module.pair_width for module in cores if module.is_in(layer))
        doubled += pair_width * model.attention.doubled_pairs(layer, seq_len_tokens)
    return 3 * doubled // seq_len_tokens
