"""What a run does, as data: from `[run]` and `[train]` to `[metrics]` and `[profile]` of a recipe."""

from dataclasses import dataclass
from typing import Literal

SAMPLE_PROMPT_TOKENS = 64
"""How much of a held-out document the model reads before it writes `metrics.sample_tokens` of its own."""


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and on what it runs."""

    folder: str = "runs/default"
    """Folder for recipe, environment, metrics, logs and checkpoints; a run that finds checkpoints there resumes from
    the last one."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the run computes; `auto` takes CUDA where there is a GPU, and says so in the log."""
    is_deterministic: bool = False
    """Use deterministic algorithms only; slower on GPUs. CPU runs are deterministic without it."""


@dataclass(frozen=True)
class TrainConfig:
    """The step."""

    steps: int = 100
    """Optimizer steps of the whole run, resumed parts included."""
    seq_len_tokens: int = 256
    """Tokens in one sequence (N)."""
    global_batch_sequences: int = 8
    """Sequences in one optimizer step over all ranks; micro_batch_sequences times the data-parallel ranks divides
    it, the quotient is the number of microbatches."""
    micro_batch_sequences: int = 8
    """Sequences that one rank sends through the model at a time (B)."""
    force_balanced_routing: bool = False
    """Benchmarks only: replace the router's choice by an even one, so that runs can be compared; the log and the
    metrics say so."""
    force_skewed_routing: bool = False
    """Benchmarks only: replace the router's choice by an uneven one, fixed and the same in every layer, in which the
    hottest expert has 1.8 times the mean load and the hottest of the ep ranks 1.2 times; the log and the metrics say
    so."""

    @property
    def forced_routing(self) -> str:
        """What replaces the router's choice: `balanced` or `skewed` routing; empty where nothing does."""
        if self.force_balanced_routing:
            return "balanced"
        return "skewed" if self.force_skewed_routing else ""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (arXiv:1711.05101) and its schedule: linear warm-up, constant, decay."""

    kind: Literal["adamw", "fused_adamw"] = "adamw"
    """`adamw` is torch's fused AdamW, one dtype for parameter, gradient and moments; `fused_adamw` is ours, which knows
    `precision.moments`, clips as it reads the gradients and rounds at random into bf16 (on a CPU its plain
    reference)."""
    lr: float = 3e-4
    """Highest learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings; scales of norms and biases have none."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 switches clipping off."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly; in a shorter run the rise ends unfinished with it."""
    decay_steps: int = 0
    """Steps at the end of the run over which it falls; at most those that the warm-up leaves, so that any
    `train.steps` runs."""
    decay: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the fall."""
    min_lr_ratio: float = 0.1
    """Where the fall ends, as a fraction of `lr`."""


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from and how they become sequences."""

    source: Literal["synthetic", "text", "datasets", "tokens"] = "synthetic"
    """`synthetic` makes learnable random tokens, `text` reads local files, `datasets` reads through Hugging Face
    datasets, `tokens` reads a flat binary file of token ids."""
    path: str = ""
    """`text`: glob of files (`**` allowed; `python-stdlib` means the running Python's own library sources).
    `datasets`: hub name, local folder, or a file type such as `json`. `tokens`: glob of binary files."""
    files: str = ""
    """`datasets`: glob of local data files, for when `path` is a file type."""
    subset: str = ""
    """`datasets`: configuration name."""
    split: str = "train"
    """`datasets`: split."""
    text_column: str = "text"
    """`datasets`: column with the text."""
    is_streamed: bool = False
    """`datasets`: read as a stream instead of downloading first."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """`tokens`: how the ids are stored, little-endian."""
    tokenizer: str = "bytes"
    """`bytes` (vocabulary 256, plus document ends as byte 0) or the path of a folder with a Hugging Face
    `tokenizer.json`; `tokens` may leave it empty where it is unknown: a document is then a file."""
    document_attention: bool = False
    """Tokens attend to their own document only; without it a packed sequence is one causal context."""
    is_shuffled: bool = True
    """Draw the sequences of an epoch in a seeded random order; streams keep their own."""
    holdout_fraction: float = 0.0
    """Share of the documents kept from training for validation, the last ones (`text`, `datasets`, `tokens`). A stream
    has no known end: it keeps as many of its first documents as a validation reads, and wants 0 here."""
    cache_folder: str = ""
    """Where tokenised corpora are kept between runs; empty means inside the run folder."""


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out sequences."""

    every_steps: int = 0
    """Steps between validations, one after the last step included; 0 switches it off."""
    num_sequences: int = 64
    """Sequences a validation reads, the same ones every time."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every_steps: int = 0
    """Steps between saves; 0 saves at SIGTERM and Ctrl-C only."""
    keep_latest: int = 2
    """Newest checkpoints that are kept, at least 2; 0 keeps all."""
    is_async: bool = False
    """Write to disk in the background, from a copy in host memory."""
    load_from: str = ""
    """Checkpoint folder (`.../step-100`) to start the weights from when the run folder has no checkpoint; the step
    count starts at 0."""


@dataclass(frozen=True)
class MetricsConfig:
    """What a run reports."""

    every_steps: int = 10
    """Steps between log lines; only a logged step reads anything from the device."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""
    progress_bar: bool = True
    """Show a bar on rank 0 when standard error is a terminal."""
    sample_tokens: int = 0
    """Tokens that the trained model writes at the end of the run, from a held-out prompt; 0 writes nothing."""
    sample_temperature: float = 0.8
    """How freely it chooses them: logits are divided by this before a token is drawn; 0 always takes the likeliest."""


@dataclass(frozen=True)
class ProfileConfig:
    """A Chrome trace of a few steps."""

    start_step: int = 0
    """First step to trace; 0 switches tracing off."""
    num_steps: int = 3
    """Steps to trace."""
