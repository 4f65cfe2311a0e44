"""Dtypes and formats of training: `[precision]` of a recipe."""

from dataclasses import dataclass
from typing import Literal

from titan_moe.config.formats import Format, GemmFormats

Dtype = Literal["bf16", "fp32", "fp64"]
Master = Literal["bf16", "fp32", "fp64", "fp32_split"]
Moments = Literal["bf16", "fp32", "fp64", "fp8"]
BYTES_OF_DTYPE: dict[Master, int] = {"bf16": 2, "fp32": 4, "fp64": 8, "fp32_split": 4}
BYTES_OF_MOMENT: dict[Moments, float] = {"bf16": 2, "fp32": 4, "fp64": 8, "fp8": 1 + 4 / 256}
"""Bytes of an element of a moment. In fp8: a code of 1 byte, and an fp32 scale for every 256 elements."""
FormatBackend = Literal["auto", "native", "emulated"]
Part = Literal["experts", "linears"]
"""The kinds of modules that have a format: `PrecisionConfig` has a field of this name for each."""
PARTS: tuple[Part, ...] = ("experts", "linears")


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of training, and the formats of its GEMMs. Norms, router, scores, softmax and loss are computed in
    fp32 or higher. Parameters, gradients, moments and checkpoints have the same dtypes with every format."""

    compute: Dtype = "bf16"
    """Parameters and activations in forward and backward."""
    master: Master = "fp32"
    """Parameters in the optimizer.
    `bf16`: bf16, rounded stochastically, which needs optim.kind = "fused_adamw": rounded to the nearest, updates below
    1/512 of a weight are lost, which at usual learning rates are nearly all.
    `fp32`: fp32; weights are cast to `compute` where they are used.
    `fp64`: fp64, for tests.
    `fp32_split`: fp32 in two parts: a bf16 weight, which is used as it is, and the 16 bits that it lacks, which only
    optim.kind = "fused_adamw" and "muon" read (Apex: store_param_remainders). The same updates as with fp32, without
    bf16 copies of unsharded experts. One weight in 65,536, whose master is between two bf16 numbers, is rounded up,
    not to even. Checkpoints have fp32 weights, and load with `fp32` too."""
    reduce: Dtype = "fp32"
    """Gradients in reductions over ranks."""
    moments: Literal["master", "bf16", "fp32", "fp8"] = "master"
    """AdamW's two moments, and Muon's momentum. A dtype other than that of `master` needs optim.kind = "fused_adamw" or
    "muon"; "muon" has no fp8. A checkpoint loads with any dtype of moments; those in fp8 are saved as fp32.
    `master`: The dtype of `master`.
    `bf16`: bf16, with stochastic rounding.
    `fp32`: fp32.
    `fp8`: e4m3 codes and a scale for each 256 elements (arXiv:2110.02861), in torchao's class, with stochastic
    rounding. A shard of less than 4096 elements, or whose size is not a multiple of 256, keeps fp32."""
    gradients: Literal["master", "bf16", "fp32"] = "master"
    """Gradients that the optimizer reads; in this dtype a rank sums those of microbatches; in `reduce` with
    parallel.accumulate_unsharded, and where replicas sum once a step. Another dtype than that of parameters needs
    optim.kind = "fused_adamw" or "muon".
    `master`: The dtype of `master`, fp32 for "fp32_split".
    `bf16`: bf16. Sums of many microbatches lose digits: a gradient below 1/512 of the sum so far is lost.
    `fp32`: fp32, also for masters in bf16."""
    format: Format = "compute"
    """The format to which operands of GEMMs are rounded, in routed experts and dense linear layers. Embedding, head,
    router, norms, gates and the attention core are never rounded. `titan-moe check` names the format of every module.
    `compute`: None; operands have the dtype of `compute`.
    `fp8_tensorwise`: e4m3, gradients e5m2; one scale a tensor.
    `fp8_rowwise`: e4m3; one scale, a power of two, for each row of the left operand and each column of the right one.
    Native wgrad multiplies the codes of one operand by these scales; one scale for each expert or linear layer remains.
    `fp8_blockwise`: e4m3; one scale, a power of two, for 1 x 128 elements of activations and gradients and for 128 x
    128 of weights (DeepSeek-V3, arXiv:2412.19437). Native wgrad rounds its operands a second time, along tokens.
    `mxfp8`: e4m3; one scale, a power of two, for 32 elements (OCP microscaling formats).
    `nvfp4`: e2m1; one e4m3 scale for 16 elements and one fp32 scale a tensor (arXiv:2509.25149). Gradients are rounded
    stochastically. The 16 elements decide their random bits: equal ones are rounded alike in every layer and step."""
    experts: Literal["format", Format] = "format"
    """The format of routed experts; "format" means that of `precision.format`."""
    linears: Literal["format", Format] = "format"
    """The format of dense linear layers: attention projections (also MLA's), dense feed-forward layers, shared experts,
    latent projections; "format" means that of `precision.format`."""
    dgrad: Literal["format", "compute"] = "format"
    """The GEMM that computes gradients of activations.
    `format`: Operands are rounded as in forward.
    `compute`: Operands are not rounded."""
    wgrad: Literal["format", "compute"] = "format"
    """The GEMM that computes gradients of weights. torchao's recipe "rowwise_with_gw_hp" does not round it.
    `format`: Operands are rounded as in forward.
    `compute`: Operands have the dtype of `compute`. They are not rounded, except in native experts, which keep nothing
    else: rows, gradients of results, and e4m3 pre-activations, from which activations are computed anew."""
    num_layers_at_start_in_compute: int = 0
    """The first n layers have no format (Megatron: num_layers_at_start_in_bf16)."""
    num_layers_at_end_in_compute: int = 0
    """The last n layers have no format (Megatron: num_layers_at_end_in_bf16). These are of `model.num_layers`; blocks
    of multi-token prediction, which are behind them, have none either then."""
    modules_in_compute: tuple[str, ...] = ()
    """Modules without a format, as patterns of their names: ["layers.0.*", "*.attention.kv_down"]. `*` stands for any
    characters, dots included. A pattern that matches no module is refused, and patterns that leave a format without
    modules are too."""
    only_where_faster: bool = True
    """Keep a dense linear layer in the dtype of `compute` if it is too narrow to gain from the format on this GPU,
    quantisation included. On Hopper: fp8_rowwise and fp8_tensorwise below an input width of 1,024, fp8_blockwise below
    2^23 weights. Where nothing was measured, the format is used. The log and `titan-moe check` show both cases."""
    backend: FormatBackend = "auto"
    """How GEMMs in low-precision formats are computed.
    `auto`: `native` on a GPU that supports the format; any other device is refused.
    `native`: On tensor cores. fp8 needs compute capability 9.0 (Hopper), mxfp8 and nvfp4 need 10.0 (Blackwell).
    `emulated`: Operands are rounded to the format and multiplied in a wider dtype, on any device: the numerics of a
    format without its speed."""

    @property
    def has_split_masters(self) -> bool:
        """Whether the optimizer adds a remainder to a parameter."""
        return self.master == "fp32_split"

    @property
    def master_dtype(self) -> Dtype:
        """The dtype of masters, in one part or two."""
        return "fp32" if self.master == "fp32_split" else self.master

    @property
    def parameters(self) -> Dtype:
        """The dtype of the model's parameters."""
        return "bf16" if self.master == "fp32_split" else self.master

    @property
    def gradients_dtype(self) -> Dtype:
        """The dtype of the gradients of parameters."""
        return self.master_dtype if self.gradients == "master" else self.gradients

    @property
    def moments_dtype(self) -> Moments:
        """The dtype of the moments."""
        return self.master_dtype if self.moments == "master" else self.moments

    @property
    def bytes_of_moments(self) -> float:
        """Bytes of both moments of a parameter."""
        return 2 * BYTES_OF_MOMENT[self.moments_dtype]

    def format_of(self, part: Part) -> Format:
        """The format of routed experts or of dense linear layers."""
        chosen: Literal["format", Format] = getattr(self, part)
        return self.format if chosen == "format" else chosen

    def gemm_formats(self, part: Part) -> GemmFormats:
        """The formats of the three GEMMs of a part's modules."""
        chosen = self.format_of(part)
        of_gradient = {name: chosen if getattr(self, name) == "format" else "compute" for name in ("dgrad", "wgrad")}
        return GemmFormats(chosen, **of_gradient)

    @property
    def formats(self) -> list[Format]:
        """The formats of this recipe, without `compute`."""
        return sorted({self.format_of(part) for part in PARTS} - {"compute"})

    @property
    def fields_with_formats(self) -> dict[str, list[Part]]:
        """The fields that give a format, each with the parts that it gives one."""
        given: dict[str, list[Part]] = {"format": [part for part in PARTS if getattr(self, part) == "format"]}
        given |= {part: [part] for part in PARTS}
        has_format = {name: getattr(self, name) not in ("format", "compute") for name in given}
        return {name: parts for name, parts in given.items() if parts and has_format[name]}
