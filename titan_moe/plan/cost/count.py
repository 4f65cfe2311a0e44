"""Count parameters and model FLOPs of a shape, without building it, from the table of its modules.

FLOPs follow Megatron's convention, so that TFLOP/s and MFU compare with published ones: forward and backward (factor
3), two FLOPs a multiply-add, causal attention counted half, no recompute; router, norms, softmax and permutation are
not counted. With a sliding window only the tokens inside it are counted. Document masks are ignored, because document
boundaries differ by batch. Gradients that frozen parameters spare are not counted either.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from titan_moe.config.model import ModelConfig
from titan_moe.config.modules import ALONE, Module, Region, modules_of
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.recipe import Recipe
from titan_moe.config.trainable import Patterns, num_trained, passes_of, trains_all


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of modules; buffers such as the balancing bias are not parameters. A tied head has none."""

    modules: tuple[Module, ...]
    model: ModelConfig | None = None
    """Whose modules they are, where some parameters are frozen."""
    patterns: Patterns = ()
    """`optim.trainable`."""

    def __getitem__(self, region: Region) -> int:
        """Those of one region."""
        return sum(module.number * module.parameters for module in self.modules if module.region == region)

    @cached_property
    def total(self) -> int:
        """All parameters."""
        return sum(module.number * module.parameters for module in self.modules)

    @cached_property
    def active(self) -> int:
        """The parameters that one token uses, embedding and head included."""
        return self.total - sum(module.number * module.idle for module in self.modules)

    @cached_property
    def dense_of_a_rank(self) -> float:
        """Those of a rank of tp, without routed experts."""
        return sum(module.number * module.own_parameters for module in self.modules if module.region != "experts")

    @cached_property
    def all_train(self) -> bool:
        """Whether nothing is frozen."""
        return self.model is None or trains_all(self.model, self.patterns)

    @property
    def trained(self) -> int:
        """The parameters that train."""
        return round(sum(self.num_trained(module) * module.parameters for module in self.modules))

    @cached_property
    def trained_dense_of_a_rank(self) -> float:
        """Those of `dense_of_a_rank` that train."""
        if self.all_train:
            return self.dense_of_a_rank
        dense = (module for module in self.modules if module.region != "experts")
        return sum(self.num_trained(module) * module.own_parameters for module in dense)

    def num_trained(self, module: Module) -> float:
        """How many of a module train."""
        return module.number if self.model is None else num_trained(module, self.model, self.patterns)

    @property
    def replicated_over_tp(self) -> float:
        """The parameters that every rank of tp has: norms, routers, latent projections, biases, compressions of mla,
        gates of shared experts; and the projections to query, key and value where ranks share a key/value head. Those
        that train."""
        return sum(self.num_trained(module) * module.whole for module in self.modules)


def count_parameters(model: ModelConfig, parallel: ParallelConfig = ALONE) -> ParameterCount:
    """Count the parameters of a model; those of a rank follow the layout."""
    return ParameterCount(modules_of(model, parallel))


def describe_trained(recipe: Recipe) -> str:
    """What trains, in words; empty where nothing is frozen."""
    count = ParameterCount(modules_of(recipe.model), recipe.model, recipe.optim.trainable)
    if count.all_train or count.trained >= count.total:
        return ""
    share, stored = count.trained / max(count.total, 1), str(recipe.precision.compute)
    if recipe.model.adapter.has_codes:
        stored = f"codes of {recipe.model.adapter.base} and {stored}"
    return f"{count.trained:,} parameters, {share:.3%}; the others are frozen, in {stored}"


def training_flops_per_token(model: ModelConfig, seq_len_tokens: int, patterns: Patterns = ()) -> int:
    """Count the FLOPs of training on one token of a sequence: the numerator of TFLOP/s and MFU. `patterns` say what
    trains."""
    if not trains_all(model, patterns):
        layers = [None, *range(model.num_blocks)]
        return round(sum(sum(flops_of_layer(model, seq_len_tokens, layer, patterns)) for layer in layers))
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
    for layer in range(model.num_blocks) if layers is None else layers:
        pair_width = sum(module.pair_width for module in cores if module.is_in(layer))
        doubled += pair_width * model.attention.doubled_pairs(layer, seq_len_tokens)
    return 3 * doubled // seq_len_tokens


def flops_of_layer(
    model: ModelConfig, seq_len_tokens: int, layer: int | None, patterns: Patterns, path: str = ""
) -> tuple[float, float, float]:
    """Count the FLOPs of a layer, or of what is in none, or of one module of these: of forward, and in backward of
    gradients of inputs and of weights."""
    forward = of_input = of_weight = 0.0
    passes = passes_of(model, patterns)
    for row in modules_of(model):
        if (row.path, layer) not in passes or row.region == "router" or path not in ("", row.path):
            continue
        of_input_too, share = passes[row.path, layer]
        core = (
            0
            if layer is None or not row.pair_width
            else attention_core_flops_per_token(model, seq_len_tokens, [layer]) // 3
        )
        forward += 2 * row.multiply_adds + core
        of_input += of_input_too * 2 * (row.multiply_adds + core)
        of_weight += share * 2 * row.multiply_adds
    return forward, of_input, of_weight
