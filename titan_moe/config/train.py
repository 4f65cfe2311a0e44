"""The run itself: `[run]`, `[train]`, `[optim]`, `[data]`, `[validation]`, `[checkpoint]`, `[metrics]`, `[profile]`."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from titan_moe.config.batch_schedule import BatchPhase, BatchSizes
from titan_moe.config.chat import ChatConfig
from titan_moe.config.forced_loads import FORCED_LOADS, NO_LOAD
from titan_moe.config.mixture import MixtureSource
from titan_moe.config.muon import MuonConfig
from titan_moe.config.parameter_groups import ParameterGroup
from titan_moe.config.qk_clip import QKClipConfig
from titan_moe.config.schema import OneOf, Table
from titan_moe.config.upcycle import UpcycleConfig

SAMPLE_PROMPT_TOKENS = 64
"""Length of the held-out prompt for `metrics.sample_tokens`."""


@dataclass(frozen=True)
class RunConfig:
    """Folder, seed and device of a run."""

    folder: str = "runs/default"
    """Folder for recipe, environment, metrics, traces and checkpoints. If it has checkpoints, the run resumes from the
    newest one. If it has records without a checkpoint, they are moved into its subfolder `attempt-1` (or -2, ...). The
    `recipe.toml` in the folder always refers to the folder in which it is, also after the folder was moved."""
    seed: int = 0
    """Seed of the initial weights and of the data order."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the run.
    `auto`: CUDA if there is a GPU, else the CPU. The log names the choice.
    `cpu`: The CPU.
    `cuda`: GPUs; an error without one."""
    ranks_per_gpu: int = 1
    """Number of ranks that share a GPU, to try a layout on fewer GPUs than it has ranks; not for speed. Each rank needs
    the memory that it would need on a GPU of its own; figures per GPU are per rank. NCCL sends over sockets. Kernels of
    different ranks run at the same time under NVIDIA's Multi-Process Service (`nvidia-cuda-mps-control -d`); without it
    they take turns, and every exchange takes milliseconds. Without effect on CPUs."""
    is_deterministic: bool = False
    """Make two runs of one recipe on one layout give the same bits: losses, weights, moments. PyTorch uses
    deterministic implementations, and an operation without one ends the run with an error that names it. Attention does
    not use cuDNN, torch.compile does not choose reductions by timing, and NCCL reduces without NVLS. Slower on GPUs;
    CPU runs are deterministic anyway. Sets CUBLAS_WORKSPACE_CONFIG and NCCL_NVLS_ENABLE; other values of them are
    refused."""
    step_timeout_minutes: float = 10.0
    """Time limit of a step, in minutes; fractions are allowed. A rank that waits longer exits with code 1 and names the
    late rank, its step and the collective. The other ranks do the same, also if a rank is stopped or lost. The limit is
    six times as long for the first step, which compiles, for saves and for validations. There is no limit for the start
    of a run. An exchange over symmetric memory waits for half of the limit. 0 sets no limit."""


@dataclass(frozen=True)
class TrainConfig:
    """Steps and batch sizes."""

    steps: int = 100
    """Optimizer steps of the run, including those before a resume. One of `steps`, `tokens` and `epochs` says how long
    a run is; the command line decides before the recipe, the recipe before its base."""
    tokens: int = 0
    """Tokens of the run instead of `steps`, rounded to whole steps; 0 if they are not given. The recipe in the run
    folder has the steps."""
    epochs: float = 0.0
    """Passes over the data instead of `steps`, rounded to whole steps; 0 if they are not given. The size of a stream is
    unknown. A resume of the run's own recipe keeps the steps if the data has grown; this field counts them again."""
    seq_len_tokens: int = 256
    """Tokens per sequence (N)."""
    global_batch_sequences: int = 8
    """Sequences per optimizer step on all ranks; a multiple of `micro_batch_sequences` times the data-parallel ranks.
    The quotient is the number of microbatches."""
    batch_schedule: tuple[BatchPhase, ...] = ()
    """Smaller batches at the start of a run, a table `[[train.batch_schedule]]` for each, in rising order: early steps
    learn as much from fewer tokens (DeepSeek-V3, `rampup_batch_size` of Megatron). Warm-up and decay count steps of any
    size. With `compile.cudagraph` each size is another recording, after warm-ups of its own. A resume with another
    schedule goes on with the size that this one has after as many tokens."""
    micro_batch_sequences: int = 8
    """Sequences per forward pass on one rank (B)."""
    max_skipped_in_row: int = 20
    """Stop the run with exit code 1 after this many skipped steps in a row, whose gradients were not finite; 0 never
    stops it. The count is read at logged steps, before saves, and whenever the step is a multiple of this number. The
    step at which a run stops so is not saved. A save after fewer skipped steps has the weights of the last update, and
    no checkpoint from before is removed for it."""
    spike_sigmas: float = 0.0
    """Skip the update of a step whose loss or gradient norm is this many standard deviations above the mean of the last
    128 steps; 0 skips none. OLMo-core's SkipStepOptimizer uses 6. The rule needs 64 earlier steps. If loss or norm
    stay at a higher level, that level is accepted after a few skipped steps."""
    forced_load: Annotated[str, OneOf(FORCED_LOADS)] = NO_LOAD
    """For benchmarks and tests: replace the router's selection by one with this load. Logs and metrics mention it. A
    resume may change it, so a load can begin and end at a checkpoint."""

    @property
    def batch_sizes(self) -> BatchSizes:
        """The sequences of every step."""
        return BatchSizes(self.batch_schedule, self.global_batch_sequences, self.seq_len_tokens)

    @property
    def forces_load(self) -> bool:
        """Whether the router's selection is replaced."""
        return self.forced_load != NO_LOAD


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, AdamW (arXiv:1711.05101) or Muon, and its schedule: linear warmup, constant, decay."""

    kind: Literal["adamw", "fused_adamw", "muon"] = "adamw"
    """The implementation of the optimizer.
    `adamw`: torch's fused AdamW, with one dtype for parameters, gradients and moments.
    `fused_adamw`: One Triton kernel for AdamW and clipping, with `precision.moments` and stochastic rounding to bf16
    (a reference in PyTorch on CPUs).
    `muon`: Muon for the matrices of attention, dense layers and experts, each of a fused weight on its own, with one
    momentum in `precision.moments` in place of two moments (`optim.muon`). Embeddings, heads, routers, norms, biases
    and adapters have `fused_adamw`.
    """
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Of `kind = "muon"`."""
    qk_clip: QKClipConfig = field(default_factory=QKClipConfig)
    """Bounds the attention logits by the weights of queries and keys."""
    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices and embeddings. Norm scales and biases have none."""
    embeddings_decay: bool = True
    """Whether weight decay applies to embeddings. OLMo 2 turns it off (arXiv:2501.00656). Tied ones always decay,
    because they are the weight of the head too; `false` is refused for them."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with another learning rate or weight decay: a table `[[optim.groups]]` for each, of any `kind`."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 disables clipping."""
    warmup_steps: int = 0
    """Steps of the linear warmup of the learning rate. A shorter run ends during the warmup."""
    decay_steps: int = 0
    """Steps of the decay at the end of the run. In a shorter run the decay has the steps after the warmup."""
    decay: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay."""
    decay_ends: tuple[int, ...] = ()
    """Earlier steps at which a decay ends too, in rising order, each with its own `decay_steps`. The rate then is that
    of `lr` again: a long run gives a decayed checkpoint at each of these steps and goes on from it (WSD-S,
    arXiv:2410.05192; with `decay = "cosine"` also SGDR, arXiv:1608.03983). Steps behind the end of a run have no
    effect."""
    restart_warmup_steps: int = 0
    """Steps of the linear rise after each of `decay_ends`, from `min_lr_ratio` on."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of `lr`."""
    ema_decay: float = 0.0
    """Keep an exponential moving average of the weights with this decay, such as 0.999; 0 keeps none. It begins with
    the mean of the weights so far. The average of each trained parameter is in fp32, sharded as its moments, and in the
    run's checkpoints; training and validation do not read it. `titan-moe average CHECKPOINT OUT --ema` makes a
    checkpoint of the averages, which `evaluate`, `generate` and `export` take."""
    trainable: tuple[str, ...] = ()
    """The parameters that train, as patterns of their names in which `*` stands for any letters:
    `["*.router.*", "head.weight"]`. Empty: all. The others are frozen: they are kept in compute's dtype, without
    master, gradient and moments, and no weight gradient of theirs is computed. Balancing biases are no parameters; they
    follow `model.moe.bias_update_speed`."""


@dataclass(frozen=True)
class DataConfig:
    """The source of tokens, and how they are packed into sequences."""

    source: Literal["synthetic", "auto", "text", "datasets", "tokens", "mixture"] = "synthetic"
    """The source of the data.
    `synthetic`: Learnable random tokens.
    `auto`: What `path` names: local files by their ending, a folder of them, or a hub name. Endings are .txt (a file is
    a document), .jsonl, .json (an array of records, or JSON lines), .parquet, .arrow (a row is a document), any of
    these with .gz or .zst behind it, and .bin and .npy (token ids).
    `text`: Local text files.
    `datasets`: Hugging Face `datasets`, from the hub or from local files.
    `tokens`: Flat binary files of token ids.
    `mixture`: Those of `mixture`, each with its share of the sequences."""
    format: Literal["text", "chat"] = "text"
    """What a row is.
    `text`: A document, in the column `text_column`.
    `chat`: A conversation, of which the answers are learned (`data.chat`). It needs the package `transformers`."""
    path: str = ""
    """For the source `auto` a file, a glob (`**` allowed), a folder with files of one kind, or a hub name, for `text` a
    glob of files (`python-stdlib` stands for the standard library sources of the running Python), for `datasets` a hub
    name, a local folder or a file type such as `json`, for `tokens` a glob of binary files (indexes of Megatron among
    them are read as such)."""
    files: str = ""
    """Source `datasets`: glob of local data files, if `path` is a file type."""
    subset: str = ""
    """Configuration name of a hub name or of the source `datasets`."""
    mixture: tuple[MixtureSource, ...] = ()
    """Source `mixture`: a table `[[data.mixture]]` for each source, with `path` and `weight`. After any number of
    sequences, each source has given its share of them to within one; with streams, after any number of steps. A source
    is read again when all of it is read. The order does not depend on the ranks. A resume may change weights: each
    source keeps its place. With `checkpoint.accept_changed_data` sources may come and go."""
    mixture_temperature: float = 0.0
    """Source `mixture`: shares that grow with the tokens of a source, to the power of 1 over this number, without any
    `weight`. With 1 all sources are read equally often, with larger numbers small ones more often: mBERT has 1.43,
    XLM-R 3.33 (arXiv:1911.02116). 0 leaves the shares to the weights."""
    split: str = "train"
    """Split of a hub name, or of a folder whose files belong to several: folders or files named `train`, `test-*` and
    so on, as on the hub, or those of `save_to_disk`."""
    text_column: str = "text"
    """Column with the text, of rows. Where the default is not there, `content` or the only column of strings is taken,
    and the log says so."""
    is_streamed: bool = False
    """Stream rows instead of downloading and tokenising all of them first."""
    stream_lanes: int = 256
    """Divide a stream into this many lanes, whatever the number of ranks: each has a part of the data and is packed by
    itself, and a rank reads only the lanes of its sequences. All lanes give equally many sequences, to within one; a
    lane that two ranks need is read by both, which a multiple of the data-parallel ranks avoids, such as 256. JSON
    lines are cut between lines, Parquet between row groups, other and compressed files and those of the source
    `datasets` between files; there are fewer lanes where parts would be below 1 MiB. A lane that is read to its end
    begins again; the sequences of one without text have no labels. 0: one stream in the order of the data, which every
    rank reads and tokenises as a whole. A run from before this field had 0, and goes on so."""
    shuffle_buffer_sequences: int = 16
    """Sequences of a lane that are shuffled among each other, with `is_shuffled`. A resume reads so many again."""
    stream_has_worker: bool = True
    """Read the lanes of a rank in a process of its own, which has the next batch ready when a step ends."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Source `tokens`: dtype of the stored ids, little-endian, of files that do not say it themselves. These do: arrays
    of NumPy (`.npy`), files of llm.c, and files of Megatron, whose index (`.idx`) also says where documents end."""
    tokenizer: str = "bytes"
    """`bytes` (UTF-8 bytes with byte 0 as end of a document, vocabulary 256), or the path of a folder with a Hugging
    Face `tokenizer.json`. Empty for the source `tokens` if it is unknown: each file is then one document. A truncation
    or a padding that is saved in the `tokenizer.json` is not applied."""
    split_special_tokens: bool = True
    """Encode text that spells a control token of the tokenizer's folder, such as `<|endoftext|>`, as ordinary text, as
    `split_special_tokens` of transformers does. `false` makes the control token of it, also inside a document. The BOS
    and EOS around a document, and added tokens that are no control tokens, do not depend on it. A run from before this
    field had `false`: set it to go on with such a run whose text spells control tokens."""
    document_attention: bool = False
    """Restrict attention to the token's own document. Without it a packed sequence is one causal context."""
    is_shuffled: bool = True
    """Read the sequences of an epoch in a seeded random order. Streams keep their own order, but for
    `shuffle_buffer_sequences` of a lane."""
    holdout_fraction: float = 0.0
    """Fraction of the documents held out for validation, the last ones; of a single document the end of it. Must be 0
    for a stream, whose length is unknown: its first documents are held out, as many as validation needs. Must be 0 for
    synthetic data, of which validation draws other sequences."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """What happens to a row that cannot be trained on: one without text, or of invalid JSON, a conversation that
    the template refuses or without an answer, or a sequence of a token file with an id outside the vocabulary.
    `refuse`: The run saves, names file and row, and ends. After a repair of the data it goes on.
    `skip`: The row is left out and counted as `bad_rows` in the metrics. A sequence of a token file keeps its place,
    without labels. Invalid JSON can be skipped in local JSON lines."""
    cache_folder: str = ""
    """Folder for tokenised data, shared by runs: the same content, tokenizer and settings are tokenised once. Empty
    means `token_cache` beside the run folder. One process of each node makes what is missing, others wait for it. Its
    files have checksums. An entry with a damaged file is built again."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    """Conversations."""

    @property
    def streams(self) -> bool:
        """Whether rows are read as they come."""
        return self.source in ("auto", "datasets") and self.is_streamed

    @property
    def mixes_streams(self) -> bool:
        """Whether a source of a mixture is streamed."""
        return self.source == "mixture" and any(data.streams for data in self.by_source().values())

    @property
    def reads_whole_stream(self) -> bool:
        """Whether every rank reads all of a stream."""
        return self.streams and self.stream_lanes == 0

    def by_source(self) -> "dict[str, DataConfig]":
        """The data of each source of a mixture, by name; without one these data, without a name."""
        if self.source != "mixture":
            return {"": self}
        plain = replace(self, mixture=(), mixture_temperature=0.0)
        return {entry.label: replace(plain, **entry.options) for entry in self.mixture}


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out sequences."""

    every_steps: int = 0
    """Steps between validations. There is one after the last step too. 0 disables validation."""
    num_sequences: int = 64
    """Sequences per validation, the same ones every time; of each of `sets` as many."""
    path: str = ""
    """Data of its own, read as `source` says: what `data.path` may be. Empty: what `data.holdout_fraction` holds out,
    or the first documents of a stream."""
    source: Literal["auto", "text", "datasets", "tokens"] = "auto"
    """How `path` and `sets` are read: as `data.source` says. Tokenizer and column of text are those of `[data]`."""
    split: str = "validation"
    """Split of hub names and of folders with several splits in `path` and `sets`."""
    sets: Table = Table()
    """Further data by names of yours: `code = "code/*.jsonl"` in `[validation.sets]`, or `--validation.sets.code=...`,
    logs `validation_loss/code`. Where nothing else is held out, `validation_loss` is the mean of theirs."""

    @property
    def has_own_data(self) -> bool:
        """Whether there is data that training does not see, whatever is held out."""
        return bool(self.path or self.sets)


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every_steps: int = 0
    """Steps between saves; 0 saves only at SIGTERM, SIGHUP, SIGUSR1, Ctrl-C and, with `save_last_step`, the end of the
    run, and a run of more than an hour warns of it. After a signal the run stops, and goes on when it is started again.
    SLURM sends SIGUSR1 two minutes ahead with `--signal=USR1@120`; the torchrun of several nodes passes it on with
    `--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1` (torch 2.13)."""
    save_last_step: bool = True
    """Save after the last step. Benchmarks set it to false."""
    keep_latest: int = 2
    """Number of newest checkpoints to keep, at least 2; 0 keeps all. Those saved since the last update, after skipped
    steps whose gradients were not finite, are counted for themselves until an update follows: as many are kept beside
    the others."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest validation loss too, beside `keep_latest`. The loss is in its manifest, so it
    is known after a resume. A save without a validation after the same step, as after a signal, is never the best one.
    If `validation.num_sequences` changes in a run, losses before and after are compared all the same; after a change of
    the data they are not, and the best checkpoint of the earlier data is kept beside."""
    keep_every_steps: int = 0
    """Never delete the checkpoints whose step is a multiple of this number, beside `keep_latest`; 0 keeps none of them.
    A multiple of `every_steps`."""
    is_async: bool = False
    """Write to disk in the background, from a copy in host memory."""
    accept_changed_data: bool = False
    """Go on from a checkpoint although the data is not what it was, for example because it has grown. The log and
    `metrics.jsonl` name both fingerprints. The number of sequences read so far is kept. If an epoch has another number
    of sequences, a shuffled order is another one: sequences of this epoch may come twice. The recipe in the run folder
    has `false` again, so the choice holds for one resume. A run that bad data has ended needs no switch after the
    repair."""
    load_from: str = ""
    """Checkpoint folder (`.../step-100`) with the initial weights of a run whose folder has no checkpoint, or `hf:` and
    the folder of a Hugging Face checkpoint, such as `hf:models/Qwen3-30B-A3B`. Each rank reads its own slices. The step
    count starts at 0. `titan-moe recipe FOLDER` writes the `[model]` of such a checkpoint."""
    upcycle: UpcycleConfig = field(default_factory=UpcycleConfig)
    """Experts from the MLPs of a dense checkpoint in `load_from`."""
    load_without: tuple[str, ...] = ()
    """Parts of a Hugging Face checkpoint in `load_from` that are left out because `[model]` lacks them, such as
    `["mtp"]`; without this they are refused by name. Exports list them."""
    saves_frozen: bool = True
    """Save frozen weights too. With `false` a checkpoint has what trains, with its moments, and a resume reads the rest
    from `load_from` again, and refuses other content. `titan-moe generate`, `evaluate` and `export --adapter` take
    such a checkpoint; other commands need a whole one."""
    load_adapter: str = ""
    """Folder with the files of a PEFT adapter, with which the adapters of a run begin whose folder has no checkpoint.
    Names, ranks and scales must be those of `model.adapter`."""
    export_adapter_at_end: bool = False
    """Write the adapter as PEFT's files into `adapter/step-N` of the run folder when the run has done its last step,
    from the checkpoint of this step. `titan-moe export CHECKPOINT FOLDER --adapter` does it later, and in another
    form."""
    export_hf_at_end: bool = False
    """Write the weights as a Hugging Face checkpoint into `hf/step-N` of the run folder when the run has done its last
    step, adapters added. Config, tokenizer and generation files are those of the checkpoint that the run began with, if
    it was one of Hugging Face. The dtype is the one that its config.json names, else bf16."""


@dataclass(frozen=True)
class MetricsConfig:
    """Logs and metrics."""

    every_steps: int = 10
    """Steps between log lines. On other steps, metrics read nothing from the device."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run folder, with an image of the expert loads (a row for each layer, white
    from 4 times the mean) at every tenth logged step, and the most important settings of the run (HParams)."""
    wandb: bool = False
    """Write the same to Weights & Biases, with the package wandb (`pip install wandb`). A resumed run goes on in the
    same run there. A failure of it is a warning. Its environment variables hold: WANDB_MODE=offline needs no network,
    WANDB_ENTITY is the team. RUN/wandb has the names of host and user."""
    wandb_project: str = "titan_moe"
    """The project there."""
    wandb_name: str = ""
    """The name of the run there; empty for that of its folder."""
    progress_bar: bool = True
    """Show a progress bar on rank 0 if standard error is a terminal."""
    sample_tokens: int = 0
    """Tokens to generate from a held-out prompt at the end of the run; 0 generates nothing."""
    sample_temperature: float = 0.8
    """Sampling temperature of the generated text: logits are divided by it. 0 takes the most likely token."""


@dataclass(frozen=True)
class ProfileConfig:
    """A Chrome trace of a few steps of a run: `RUN/traces/step-N-rank-R.json`, for https://ui.perfetto.dev or
    chrome://tracing. `titan-moe trace` starts a short run of its own instead, in RUN/trace, and also writes a report of
    the time of each part."""

    start_step: int = 0
    """First step to trace; 0 disables tracing. The first steps of a run compile, tune and allocate. A run that resumes
    after this step traces nothing. For `titan-moe trace` 0 means the first steps that are taken as all later ones: once
    kernels are compiled, a capacity factor is chosen, and CUDA graphs are replayed."""
    num_steps: int = 3
    """Number of steps to trace. The profiler keeps all of their events in memory until the last one ends."""
