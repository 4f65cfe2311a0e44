"""Rules of kernels, dtypes and memory: which combinations exist on the device that the recipe names."""

from collections.abc import Iterator
from dataclasses import asdict

from titan_moe.config.optimizers import OPTIMIZERS, kinds_with
from titan_moe.config.perf import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules.capture import obstacles, without_host_reads
from titan_moe.config.rules.rule import nearest_multiples, rule, rules_in
from titan_moe.config.skew import obstacles_to_skew

GROUPED_MM_STRIDE_BYTES = 16


@rule("grouped_mm knows the dtype", "torch.nn.functional.grouped_mm takes bf16, and fp32 on CPU only")
def grouped_mm_knows_the_dtype(recipe: Recipe, world_size: int) -> Iterator[str]:
    experts, compute, device = recipe.perf.chosen_kernels.experts, recipe.precision.compute, recipe.run.device
    allowed = ["bf16"] if device == "cuda" or experts == "fused" else ["bf16", "fp32"]
    if experts != "reference" and compute not in allowed:
        where = f'run.device = "{device}"'
        yield (
            f'precision.compute = "{compute}" has no perf.kernels = "{experts}" with {where}; '
            f'take {" or ".join(allowed)}, or perf.kernels = "reference"'
        )


@rule(
    "Triton kernels can run",
    "they compute in fp32 on GPUs, the experts' gather rows inside a GEMM, where no score can reach them, and what "
    "adds gradients knows bf16 and fp32 alone",
)
def triton_kernels_can_run(recipe: Recipe, world_size: int) -> Iterator[str]:
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


@rule("expert rows are aligned", "grouped_mm wants row strides that are multiples of 16 bytes")
def expert_rows_are_aligned(recipe: Recipe, world_size: int) -> Iterator[str]:
    model = recipe.model
    if recipe.perf.chosen_kernels.experts == "reference" or model.num_moe_layers <= 0:
        return
    step = GROUPED_MM_STRIDE_BYTES // BYTES_OF_DTYPE[recipe.precision.compute]
    width_key = "moe.latent_size" if model.moe.latent_size else "hidden_size"
    widths = {width_key: model.moe.latent_size or model.hidden_size, "moe.ffn_hidden_size": model.moe.ffn_hidden_size}
    for key, width in widths.items():
        if width % step:
            yield (
                f"model.{key} = {width} is not a multiple of {step}, which grouped_mm needs in "
                f'{recipe.precision.compute}; take {nearest_multiples(width, step)}, or perf.kernels = "reference"'
            )


@rule(
    "master and reduce are no coarser than compute", "digits that were computed would be thrown away before the update"
)
def precision_does_not_sink(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.precision
    for key in ("master", "reduce"):
        if BYTES_OF_DTYPE[getattr(p, key)] < BYTES_OF_DTYPE[p.compute]:
            yield (
                f'precision.{key} = "{getattr(p, key)}" is coarser than precision.compute = "{p.compute}"; '
                f'take "{p.compute}" or finer'
            )


@rule(
    "the optimizer knows its dtypes",
    "torch's AdamW has one dtype for parameter and moments, ours computes in fp32 on GPUs",
)
def the_optimizer_knows_its_dtypes(recipe: Recipe, world_size: int) -> Iterator[str]:
    p, kind = recipe.precision, recipe.optim.kind
    if p.master == "fp64" and p.moments_dtype != "fp64":
        yield f'precision.moments = "{p.moments}" is coarser than precision.master = "fp64"; take "master"'
    elif p.moments_dtype != p.master and not OPTIMIZERS[kind].has_own_moments:
        yield (
            f'precision.moments = "{p.moments}" beside precision.master = "{p.master}" needs optim.kind = '
            f'{kinds_with("has_own_moments")}; take that, or precision.moments = "master"'
        )
    if p.master == "fp64" and recipe.run.device == "cuda" and not OPTIMIZERS[kind].takes_fp64_on_gpus:
        yield (
            f'precision.master = "fp64" has no optim.kind = "{kind}" with run.device = "cuda"; take fp32 or bf16, or '
            f"optim.kind = {kinds_with('takes_fp64_on_gpus')}"
        )


@rule("the attention backend exists", "these kernels run, or train, on GPUs only")
def attention_backend_exists(recipe: Recipe, world_size: int) -> Iterator[str]:
    backend = recipe.perf.attention
    if recipe.run.device == "cpu" and backend in ("cudnn", "efficient", "flex"):
        yield f'perf.attention = "{backend}" does not exist with run.device = "cpu"; take "auto", "flash" or "math"'


@rule(
    "what is captured asks the host nothing",
    "a CUDA graph repeats what was recorded, whatever the host would have answered",
)
def graphs_can_be_captured(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.compile.cudagraph == "microbatch" and recipe.parallel.accumulate_unsharded:
        yield (
            'compile.cudagraph = "microbatch" records one microbatch for all, but parallel.accumulate_unsharded = true '
            'makes the first and the last of a step differ; take "step", or accumulate_unsharded = false'
        )
    if recipe.compile.cudagraph != "off":
        for obstacle in obstacles(recipe):
            yield f'compile.cudagraph = "{recipe.compile.cudagraph}": {obstacle}'


@rule("FlexAttention knows the dtype", "its kernels sum in fp32")
def flex_knows_the_dtype(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.perf.attention == "flex" and recipe.precision.compute == "fp64":
        yield 'precision.compute = "fp64" has no perf.attention = "flex"; take bf16 or fp32, or perf.attention = "math"'


@rule("blocks that compile whole read nothing on the host", "a graph cannot wait for a size in its middle")
def whole_blocks_read_nothing(recipe: Recipe, world_size: int) -> Iterator[str]:
    p = recipe.parallel
    if recipe.compile.compiles_blocks() and p.facts.reads_host and recipe.model.num_moe_layers > 0:
        yield (
            f'compile.extent = "block" cannot hold parallel.dispatcher = "{p.dispatcher}", which reads its row counts '
            f'on the host; take {without_host_reads()}, or compile.extent = "pieces"'
        )


@rule("recomputed experts exist", "nothing would be recomputed")
def recomputed_experts_exist(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.memory.recompute == "experts" and recipe.model.num_moe_layers <= 0:
        yield 'memory.recompute = "experts" needs layers with experts, and this model has none; take "block" or "none"'


@rule("forced routing needs a router", "there is no choice to replace")
def forced_routing_needs_a_router(recipe: Recipe, world_size: int) -> Iterator[str]:
    forced = recipe.train.forced_routing
    if forced and recipe.model.num_moe_layers <= 0:
        yield f"train.force_{forced}_routing = true needs layers with experts, and this model has none; set it to false"


@rule("one routing is forced", "a token's experts cannot be chosen twice")
def one_routing_is_forced(recipe: Recipe, world_size: int) -> Iterator[str]:
    if recipe.train.force_balanced_routing and recipe.train.force_skewed_routing:
        yield "train.force_balanced_routing and train.force_skewed_routing are both true; set one of them to false"


@rule(
    "a skewed routing can be dealt",
    "what is called skewed has the same loads everywhere, so that figures can be compared",
)
def skew_can_be_dealt(recipe: Recipe, world_size: int) -> Iterator[str]:
    model = recipe.model
    if recipe.train.force_skewed_routing and model.num_moe_layers > 0:
        for obstacle in obstacles_to_skew(model.moe.num_experts, model.moe.top_k, recipe.parallel.ep):
            yield f"train.force_skewed_routing = true: {obstacle}"


PERF_RULES = rules_in(globals())
