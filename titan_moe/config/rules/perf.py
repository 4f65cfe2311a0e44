"""Rules of kernels, dtypes and memory: which combinations exist on the device that the recipe names."""

from collections.abc import Iterator
from dataclasses import asdict

from titan_moe.config.parallel import HOST_READERS
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.capture import obstacles
from titan_moe.config.rules.rule import Rule, nearest_multiples
from titan_moe.config.skew import obstacles_to_skew

BYTES_OF = {"bf16": 2, "fp32": 4, "fp64": 8}
GROUPED_MM_STRIDE_BYTES = 16


def _grouped_mm_knows_the_dtype(recipe: Recipe, world_size: int) -> Iterator[str]:
    experts, compute, device = recipe.perf.chosen_kernels.experts, recipe.precision.compute, recipe.run.device
    allowed = ["bf16"] if device == "cuda" or experts == "fused" else ["bf16", "fp32"]
    if experts != "reference" and compute not in allowed:
        where = f'run.device = "{device}"'
        yield (
            f'precision.compute = "{compute}" has no perf.kernels = "{experts}" with {where}; '
            f'take {" or ".join(allowed)}, or perf.kernels = "reference"'
        )


def _triton_kernels_can_run(recipe: Recipe, world_size: int) -> Iterator[str]:
    kernels = recipe.perf.chosen_kernels
    triton = [name for name, backend in asdict(kernels).items() if backend in ("fused", "triton")]
    if triton and recipe.precision.compute == "fp64":
        yield (
            f'precision.compute = "fp64" has no Triton kernels ({", ".join(triton)}); take perf.kernels = "reference" '
            "and override none of them"
        )
    if triton and recipe.run.device == "cpu":
        overridden = [name for name in triton if getattr(recipe.perf.override, name) != "no"]
        rest = [name for name in triton if name not in overridden]
        for name in overridden:
            yield (
                f'perf.override.{name} = "{getattr(kernels, name)}" is a Triton kernel, which does not exist with '
                'run.device = "cpu"; take "no"'
            )
        if rest:
            yield (
                f'perf.kernels = "{recipe.perf.kernels}" takes Triton kernels ({", ".join(rest)}), which do not exist '
                'with run.device = "cpu"; take "grouped_mm" or "reference"'
            )
    if kernels.experts == "fused" and recipe.model.num_moe_layers > 0:
        for need in recipe.model.moe.unmet_needs_of_fused:
            yield f'perf.kernels = "fused" needs {need}; take that, or perf.kernels = "grouped_mm"'
    p = recipe.precision
    if kernels.gradients == "triton" and (p.compute, p.master) != ("bf16", "fp32"):
        yield (
            f'perf.override.gradients = "triton" adds bf16 to fp32, not precision.compute = "{p.compute}" to '
            f'precision.master = "{p.master}"; take "bf16" and "fp32", or perf.override.gradients = "torch"'
        )


def _expert_rows_are_aligned(recipe: Recipe, world_size: int) -> Iterator[str]:
    model = recipe.model
    if recipe.perf.chosen_kernels.experts == "reference" or model.num_moe_layers <= 0:
        return
    step = GROUPED_MM_STRIDE_BYTES // BYTES_OF[recipe.precision.compute]
    width_key = "moe.latent_size" if model.moe.latent_size else "hidden_size"
    widths = {width_key: model.moe.latent_size or model.hidden_size, "moe.ffn_hidden_size": model.moe.ffn_hidden_size}
    for key, width in widths.items():
        if width % step:
            yield (
                f"model.{key} = {width} is not a multiple of {step}, which grouped_mm needs in "
                f'{recipe.precision.compute}; take {nearest_multiples(width, step)}, or perf.kernels = "reference"'
            )


def _precision_does_not_sink(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    for key in ("master", "reduce"):
        if BYTES_OF[getattr(p, key)] < BYTES_OF[p.compute]:
            yield (
                f'precision.{key} = "{getattr(p, key)}" is coarser than precision.compute = "{p.compute}"; '
                f'take "{p.compute}" or finer'
            )


def _the_optimizer_knows_its_dtypes(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, optimizer = recipe.precision, recipe.perf.optimizer
    if p.master == "fp64" and p.moments_dtype != "fp64":
        yield f'precision.moments = "{p.moments}" is coarser than precision.master = "fp64"; take "master"'
    elif p.moments_dtype != p.master and optimizer == "torch":
        yield (
            f'precision.moments = "{p.moments}" beside precision.master = "{p.master}" needs perf.optimizer = "fused"; '
            'take that, or precision.moments = "master"'
        )
    if p.master == "fp64" and optimizer == "fused" and recipe.run.device == "cuda":
        yield (
            'precision.master = "fp64" has no perf.optimizer = "fused" with run.device = "cuda"; take fp32 or bf16, or '
            'perf.optimizer = "torch"'
        )


def _attention_backend_exists(recipe: Recipe, world_size: int) -> Iterator[str]:
    backend = recipe.perf.attention
    if recipe.run.device == "cpu" and backend in ("cudnn", "efficient", "flex"):
        yield f'perf.attention = "{backend}" does not exist with run.device = "cpu"; take "auto", "flash" or "math"'


def _graphs_can_be_captured(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.compile.cudagraph == "microbatch" and recipe.parallel.accumulate_unsharded:
        yield (
            'compile.cudagraph = "microbatch" records one microbatch for all, but parallel.accumulate_unsharded = true '
            'makes the first and the last of a step differ; take "step", or accumulate_unsharded = false'
        )
    if recipe.compile.cudagraph != "off":
        for obstacle in obstacles(recipe):
            yield f'compile.cudagraph = "{recipe.compile.cudagraph}": {obstacle}'


def _flex_knows_the_dtype(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.perf.attention == "flex" and recipe.precision.compute == "fp64":
        yield 'precision.compute = "fp64" has no perf.attention = "flex"; take bf16 or fp32, or perf.attention = "math"'


def _whole_blocks_read_nothing(recipe: Recipe, world_size: int) -> Iterator[str]:
    dispatcher = recipe.parallel.dispatcher
    compiles_blocks = recipe.compile.regional != "off" and recipe.compile.extent == "block"
    if compiles_blocks and dispatcher in HOST_READERS and recipe.model.num_moe_layers > 0:
        yield (
            f'compile.extent = "block" cannot hold parallel.dispatcher = "{dispatcher}", which reads its row counts '
            'on the host; take "allgather" or "symm_mem" ("local" where parallel.ep = 1), or compile.extent = "pieces"'
        )


def _recomputed_experts_exist(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.memory.recompute == "experts" and recipe.model.num_moe_layers <= 0:
        yield 'memory.recompute = "experts" needs layers with experts, and this model has none; take "block" or "none"'


def _forced_routing_needs_a_router(recipe: Recipe, world_size: int) -> Iterator[str]:
    forced = recipe.train.forced_routing
    if forced and recipe.model.num_moe_layers <= 0:
        yield f"train.force_{forced}_routing = true needs layers with experts, and this model has none; set it to false"


def _one_routing_is_forced(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.train.force_balanced_routing and recipe.train.force_skewed_routing:
        yield "train.force_balanced_routing and train.force_skewed_routing are both true; set one of them to false"


def _skew_can_be_dealt(recipe: Recipe, world_size: int) -> Iterator[str]:
    model = recipe.model
    if recipe.train.force_skewed_routing and model.num_moe_layers > 0:
        for obstacle in obstacles_to_skew(model.moe.num_experts, model.moe.top_k, recipe.parallel.ep):
            yield f"train.force_skewed_routing = true: {obstacle}"


PERF_RULES = [
    Rule(
        "grouped_mm knows the dtype",
        _grouped_mm_knows_the_dtype,
        "torch.nn.functional.grouped_mm takes bf16, and fp32 on CPU only",
    ),
    Rule(
        "Triton kernels can run",
        _triton_kernels_can_run,
        "they compute in fp32 on GPUs, the experts' gather rows inside a GEMM, where no score can reach them, and what "
        "adds gradients knows bf16 and fp32 alone",
    ),
    Rule(
        "expert rows are aligned",
        _expert_rows_are_aligned,
        "grouped_mm wants row strides that are multiples of 16 bytes",
    ),
    Rule(
        "master and reduce are no coarser than compute",
        _precision_does_not_sink,
        "digits that were computed would be thrown away before the update",
    ),
    Rule(
        "the optimizer knows its dtypes",
        _the_optimizer_knows_its_dtypes,
        "torch's AdamW has one dtype for parameter and moments, ours computes in fp32 on GPUs",
    ),
    Rule(
        "what is captured asks the host nothing",
        _graphs_can_be_captured,
        "a CUDA graph repeats what was recorded, whatever the host would have answered",
    ),
    Rule("the attention backend exists", _attention_backend_exists, "these kernels run, or train, on GPUs only"),
    Rule("FlexAttention knows the dtype", _flex_knows_the_dtype, "its kernels sum in fp32"),
    Rule(
        "blocks that compile whole read nothing on the host",
        _whole_blocks_read_nothing,
        "a graph cannot wait for a size in its middle",
    ),
    Rule("recomputed experts exist", _recomputed_experts_exist, "nothing would be recomputed"),
    Rule("forced routing needs a router", _forced_routing_needs_a_router, "there is no choice to replace"),
    Rule("one routing is forced", _one_routing_is_forced, "a token's experts cannot be chosen twice"),
    Rule(
        "a skewed routing can be dealt",
        _skew_can_be_dealt,
        "what is called skewed has the same loads everywhere, so that figures can be compared",
    ),
]
