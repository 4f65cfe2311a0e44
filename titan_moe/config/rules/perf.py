"""Rules of kernels, dtypes and memory: which combinations exist on the recipe's device."""

from collections.abc import Iterator
from dataclasses import asdict

from titan_moe.config.forced_loads import FORCED_LOADS
from titan_moe.config.gemms import unmet_needs_of_fused
from titan_moe.config.kernels import GROUPED_MM_STRIDE_BYTES
from titan_moe.config.muon import MuonConfig
from titan_moe.config.optimizers import OPTIMIZERS
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.capture import step_can_be_captured
from titan_moe.config.rules.rule import Problem, key_of_kernel, row, rule, rules_in, said
from titan_moe.config.skew import obstacles_to_skew

LARGEST_DENSE_MASK_GIB = 1
"""Of a mask for SDPA, which has a byte for each pair of a query and a key; 32,768 tokens without cp."""


@rule(
    "torch.nn.functional.grouped_mm takes bf16, and fp32 on CPU only",
    "precision.compute run.device perf.kernels perf.override.experts",
)
def grouped_mm_has_the_dtype(recipe: Recipe, world_size: int) -> Iterator[str]:
    experts, compute, device = recipe.perf.chosen_kernels.experts, recipe.precision.compute, recipe.run.device
    allowed = ["bf16"] if device == "cuda" or experts == "fused" else ["bf16", "fp32"]
    if recipe.model.num_moe_layers > 0 and experts != "reference" and compute not in allowed:
        key = key_of_kernel(recipe, "experts")
        chosen = f'perf.kernels = "{recipe.perf.kernels}"' if key == "perf.kernels" else key
        yield f'precision.compute = "{compute}" has no "{experts}" experts ({chosen}) with run.device = "{device}"'


@rule(
    "Triton kernels run on GPUs and compute in fp32; fused experts gather rows inside a GEMM, without scaling them, "
    "no loss in Triton and no expert in fp8 adds a bias, and its router knows no sparsemixer and no fp64",
    "perf.kernels perf.override.experts permute router rotary head gradients precision.compute master gradients "
    "run.device precision.experts format "
    "model.moe.score_on expert_mlp_bias score_fn router_dtype model.head_bias",
)
def triton_kernels_can_run(recipe: Recipe, world_size: int) -> Iterator[str]:
    kernels = recipe.perf.chosen_kernels
    triton = [name for name, backend in asdict(kernels).items() if backend in ("fused", "triton")]
    if triton and recipe.precision.compute == "fp64":
        yield f'precision.compute = "fp64" has no Triton kernels ({", ".join(triton)})'
    if triton and recipe.run.device == "cpu":
        rest = [name for name in triton if getattr(recipe.perf.override, name) == "no"]
        for name in (name for name in triton if name not in rest):
            setting = f'perf.override.{name} = "{getattr(kernels, name)}"'
            yield f'{setting} is a Triton kernel, which does not run with run.device = "cpu"'
        if rest:
            yield (
                f'perf.kernels = "{recipe.perf.kernels}" chooses Triton kernels ({", ".join(rest)}), which do not run '
                'with run.device = "cpu"'
            )
    if kernels.experts == "fused" and recipe.model.num_moe_layers > 0:
        key = key_of_kernel(recipe, "experts")
        for need in unmet_needs_of_fused(recipe):
            yield f'{key} = "fused" needs {need}'
    for name, need in recipe.model.unmet_needs_of_triton.items():
        if getattr(kernels, name) == "triton":
            key = key_of_kernel(recipe, name)
            yield f'{key} = "{recipe.perf.kernels if key == "perf.kernels" else "triton"}" needs {need}'
    p = recipe.precision
    if kernels.gradients == "triton" and (p.compute, p.gradients_dtype) != ("bf16", "fp32"):
        key, field = key_of_kernel(recipe, "gradients"), "master" if p.gradients == "master" else "gradients"
        yield (
            f'{key} = "{"fused" if key == "perf.kernels" else "triton"}" adds gradients in bf16 to fp32, not '
            f'precision.compute = "{p.compute}" to precision.{field} = "{getattr(p, field)}"'
        )


def multiple_of_expert_rows(recipe: Recipe) -> int:
    """The number that must divide the widths of the experts' operands on a rank."""
    if recipe.perf.chosen_kernels.experts == "reference":
        return 1
    return GROUPED_MM_STRIDE_BYTES // BYTES_OF_DTYPE[recipe.precision.compute]


@rule(
    "grouped_mm needs row strides that are multiples of 16 bytes",
    "perf.kernels perf.override.experts model.hidden_size model.moe.latent_size ffn_hidden_size",
)
def expert_rows_are_aligned(recipe: Recipe, world_size: int) -> Iterator[str]:
    model, step = recipe.model, multiple_of_expert_rows(recipe)
    if model.num_moe_layers <= 0 or step == 1:
        return
    width_key = "moe.latent_size" if model.moe.latent_size else "hidden_size"
    widths = {width_key: (model.expert_width, 1)}
    widths["moe.ffn_hidden_size"] = (model.moe.ffn_hidden_size, max(recipe.parallel.etp, 1))
    for key, (width, parts) in widths.items():
        if width % (step * parts):
            split = f" for each of {parts} etp ranks" if parts > 1 else ""
            yield Problem(
                f"model.{key} = {width} is not a multiple of {step}{split}, which grouped_mm needs in "
                f"{recipe.precision.compute}",
                steps=[step * parts],
            )


@rule("gradients would lose digits before the update", "precision.master gradients reduce compute")
def master_and_reduce_are_no_coarser_than_compute(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    for key in ("master", "reduce", *([] if p.gradients == "master" else ["gradients"])):
        if BYTES_OF_DTYPE[getattr(p, key)] < BYTES_OF_DTYPE[p.compute]:
            yield f'precision.{key} = "{getattr(p, key)}" is coarser than precision.compute = "{p.compute}"'


@rule(
    "adamw has one dtype for parameters and moments; fused_adamw and muon compute in fp32 on GPUs; a momentum of "
    "muon is a plain tensor",
    "precision.moments master gradients optim.kind",
)
def optimizer_has_the_dtypes(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, facts = recipe.precision, OPTIMIZERS[recipe.optim.kind]
    if p.master == "fp64" and p.moments_dtype != "fp64":
        yield said(recipe, "{precision.moments} is coarser than {precision.master}")
    elif p.moments_dtype != p.master_dtype and not facts.has_own_moments:
        yield said(recipe, "{precision.moments} beside {precision.master} has no {optim.kind}")
    elif p.moments_dtype == "fp8" and not facts.has_8bit_moments:
        yield said(recipe, "{precision.moments} has no {optim.kind}")
    if (p.has_split_masters or p.gradients_dtype != p.parameters) and not facts.has_own_gradients:
        key = "{precision.master}" if p.has_split_masters else "{precision.gradients} beside {precision.master}"
        yield said(recipe, f"{key} has no {{optim.kind}}")
    if p.master == "fp64" and recipe.run.device == "cuda" and not facts.takes_fp64_on_gpus:
        yield said(recipe, "{precision.master} has no {optim.kind} with {run.device}")


muon_has_matrices = row(
    "Muon updates matrices, and adapters are trained by AdamW",
    lambda r: r.optim.kind == "muon" and r.model.adapter.is_used and not r.optim.trainable,
    "{optim.kind} has no matrix to update where {model.adapter.rank} freezes them",
    "optim.kind",
)


@rule("an option without effect hides a mistake", "optim.muon.momentum nesterov ns_steps adjust_lr lr_scale optim.kind")
def options_of_muon_have_an_effect(recipe: Recipe, world_size: int) -> Iterator[str]:
    if OPTIMIZERS[recipe.optim.kind].orthogonalises:
        return
    for name, default in asdict(MuonConfig()).items():
        if getattr(recipe.optim.muon, name) != default:
            yield said(recipe, f"{{optim.muon.{name}}} has no effect with {{optim.kind}}")


bf16_weights_are_rounded_stochastically = row(
    "rounded to the nearest bf16 number, an update below 1/512 of a weight is lost, which nearly all are",
    lambda r: r.precision.master == "bf16" and not OPTIMIZERS[r.optim.kind].rounds_stochastically,
    "{precision.master} needs stochastic rounding, which {optim.kind} has not",
)
split_masters_are_for_bf16 = row(
    "the first part of a split master is the bf16 weight that GEMMs read",
    lambda r: r.precision.has_split_masters and r.precision.compute != "bf16",
    "{precision.master} has no {precision.compute}",
)
attention_backend_exists = row(
    "this backend runs, or computes gradients, on GPUs only",
    lambda r: r.run.device == "cpu" and r.perf.attention in ("cudnn", "efficient", "flex"),
    "{perf.attention} does not exist with {run.device}",
)


@rule(
    "a dense mask grows with the square of the sequence length, and its masked pairs are computed; flex has none",
    "perf.attention train.seq_len_tokens",
)
def dense_masks_fit(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, num_tokens = recipe.parallel, recipe.train.seq_len_tokens
    if recipe.run.device == "cpu" or recipe.perf.attention == "flex" or not (causes := _causes_of_masks(recipe)):
        return
    num_queries = num_tokens // max(p.cp, 1) if p.cp_kind == "allgather" else num_tokens
    num_masks = recipe.train.micro_batch_sequences if recipe.data.document_attention else 1
    gib = num_masks * num_queries * num_tokens / 2**30
    if gib > LARGEST_DENSE_MASK_GIB:
        sequences = f"{num_masks} sequences * " if num_masks > 1 else ""
        yield (
            f'perf.attention = "{recipe.perf.attention}" with {" and ".join(causes)} needs a dense mask of {sequences}'
            f"{num_queries} * {num_tokens} bytes, {gib:.3g} GiB, which is more than {LARGEST_DENSE_MASK_GIB} GiB"
        )


def _causes_of_masks(recipe: Recipe) -> list[str]:
    """The settings for which layers need masks; ring attention has none."""
    p, a, num_tokens = recipe.parallel, recipe.model.attention, recipe.train.seq_len_tokens
    if p.cp > 1 and p.cp_kind == "ring":
        return []
    has_windows = any(a.window(layer, num_tokens) < num_tokens for layer in range(recipe.model.num_layers))
    has_chunks = any(a.chunk(layer, num_tokens) < num_tokens for layer in range(recipe.model.num_layers))
    causes = {
        f"model.attention.attention_chunk_size = {a.attention_chunk_size}": has_chunks,
        "data.document_attention = true": recipe.data.document_attention,
        f"model.attention.sliding_window = {a.sliding_window}": has_windows,
        'parallel.cp_kind = "allgather"': p.cp > 1 and p.cp_kind == "allgather",
    }
    return [cause for cause, is_given in causes.items() if is_given]


attention_is_deterministic = row(
    "cuDNN's backward sums in no fixed order, so PyTorch would use another backend",
    lambda r: r.run.is_deterministic and r.perf.attention == "cudnn",
    "{run.is_deterministic} excludes {perf.attention}",
    "perf.attention run.is_deterministic",
)


@rule(
    step_can_be_captured.why,
    "compile.cudagraph run.device parallel.dispatcher ep cp_kind perf.kernels perf.override.experts memory.recompute",
)
def graphs_can_be_captured(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.compile.cudagraph != "off":
        for breach in step_can_be_captured.breaches(recipe, world_size):
            yield f'compile.cudagraph = "{recipe.compile.cudagraph}": {breach.problem}'


flex_has_the_dtype = row(
    "the kernels of FlexAttention sum in fp32",
    lambda r: r.perf.attention == "flex" and r.precision.compute == "fp64",
    "{precision.compute} has no {perf.attention}",
    "perf.attention precision.compute",
)
forced_load_needs_a_router = row(
    "without a router there is no selection to replace",
    lambda r: r.train.forces_load and r.model.num_moe_layers <= 0,
    "{train.forced_load} needs layers with experts, and this model has none",
)


@rule(
    "skewed routing has the same relative loads in all runs, so that figures can be compared",
    "train.forced_load parallel.ep model.moe.top_k",
)
def skewed_loads_are_possible(recipe: Recipe, world_size: int) -> Iterator[str]:
    model = recipe.model
    if recipe.train.forced_load == "skewed" and model.num_moe_layers > 0:
        for obstacle in obstacles_to_skew(model.moe.num_experts, model.moe.top_k, recipe.parallel.ep):
            yield f'train.forced_load = "skewed": {obstacle}'


@rule(
    "a token has top_k distinct experts, so a load needs as many experts with tokens",
    "train.forced_load parallel.ep model.moe.top_k",
)
def forced_load_has_enough_experts(recipe: Recipe, world_size: int) -> Iterator[str]:
    moe, ep, load = recipe.model.moe, recipe.parallel.ep, FORCED_LOADS[recipe.train.forced_load]
    if ep < 1 or moe.num_experts % ep or recipe.model.num_moe_layers <= 0:
        return  # another rule refuses this
    number = load.num_experts_in_use(moe.num_experts, ep)
    if number < moe.top_k <= moe.num_experts:
        says = f"{{train.forced_load}} has {number} experts for all tokens with {{parallel.ep}}"
        yield said(recipe, f"{says}, and a token needs {{model.moe.top_k}}")


PERF_RULES = rules_in(globals())
