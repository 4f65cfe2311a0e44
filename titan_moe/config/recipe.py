"""The recipe of a run as frozen data. `config.rules` checks combinations of its fields."""

from dataclasses import dataclass, field

from titan_moe.config.field_docs import document_fields
from titan_moe.config.model import ModelConfig
from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.perf import CompileConfig, MemoryConfig, PerfConfig
from titan_moe.config.precision import BYTES_OF_DTYPE, PrecisionConfig
from titan_moe.config.train import (
    SAMPLE_PROMPT_TOKENS,
    CheckpointConfig,
    DataConfig,
    MetricsConfig,
    OptimConfig,
    ProfileConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
)


@dataclass(frozen=True)
class Recipe:
    """The full configuration of a run. The resolved recipe is saved in the run folder and repeats the run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    perf: PerfConfig = field(default_factory=PerfConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


document_fields(Recipe)


def num_microbatches(recipe: Recipe, world_size: int) -> int:
    """Microbatches of a rank in one optimizer step."""
    sequences_per_pass = recipe.train.micro_batch_sequences * resolve(recipe.parallel, world_size).dp
    return recipe.train.global_batch_sequences // sequences_per_pass


def counts_ahead(recipe: Recipe, world_size: int) -> bool:
    """Whether a step runs all of its forwards first, without the head, so that balancing losses have its counts."""
    p, train = recipe.parallel, recipe.train
    dp = world_size // max(p.pp * p.cp * p.tp, 1)
    are_several = train.global_batch_sequences > train.micro_batch_sequences * dp or recipe.model.mtp.num_uses > 1
    return recipe.model.moe.aux_losses.global_batch > 0 and are_several


def sums_replicas_once(recipe: Recipe) -> bool:
    """Whether gradients are summed over replicas after the last microbatch of a step alone. FSDP adds those of earlier
    ones up in the dtype of the reduction, which must be as fine as the optimizer's gradients; and before torch 2.15
    each microbatch must give the same parameters gradients, which a class of one's own may not."""
    p = recipe.precision
    is_fine = BYTES_OF_DTYPE[p.reduce] >= BYTES_OF_DTYPE[p.gradients_dtype]
    return recipe.parallel.dp_replicate > 1 and is_fine and recipe.model.class_ == ModelConfig.class_


def microbatch_tokens(recipe: Recipe) -> int:
    """Tokens of a microbatch between the layers of a rank; cp and tp ranks have parts of the same sequences."""
    train, p = recipe.train, recipe.parallel
    return train.micro_batch_sequences * train.seq_len_tokens // max(p.cp * p.tp, 1)


def max_batch_tokens(recipe: Recipe) -> int:
    """Tokens of the largest batch whose rows a rank dispatches in one forward, those of its etp group: a microbatch, or
    the prompt with all generated text."""
    return max(microbatch_tokens(recipe), text_tokens(recipe)) * max(recipe.parallel.etp, 1)


def text_tokens(recipe: Recipe) -> int:
    """Tokens of a rank's part of the text that a run generates with its prompt; 0 where it generates none."""
    p, sample_tokens = recipe.parallel, recipe.metrics.sample_tokens
    sample = min(recipe.train.seq_len_tokens, SAMPLE_PROMPT_TOKENS) + sample_tokens if sample_tokens else 0
    padded = -(-sample // max(p.length_multiple, 1)) * p.length_multiple
    return padded // max(p.cp * p.tp, 1)


def expert_slots(recipe: Recipe) -> int:
    """Expert slots of a rank in a layer, for a microbatch with a balanced load. With etp a rank has those of its etp
    group."""
    return microbatch_tokens(recipe) * recipe.parallel.etp * recipe.model.moe.top_k


def expert_hidden_size(recipe: Recipe) -> int:
    """Hidden width of a rank's part of an expert."""
    return recipe.model.moe.ffn_hidden_size // max(recipe.parallel.etp, 1)
