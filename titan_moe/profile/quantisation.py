"""Find the kernels of a trace that quantise. They form a separate part, independent of the part that launched them.

Two sources: the kernels around the GEMMs of fp8 experts and linear layers, and casts that the compiler made of
torchao's tensorwise and rowwise ones. A cast that is fused with other work, such as a norm or an
activation, stays in the part of that work; so do reductions and copies of torchao without compile, whose names say
nothing.
"""

import re

QUANTISATION = "quantisation"
"""The part."""
FP8_KERNELS = frozenset(
    {
        "_amax_kernel",
        "_cast_in_registers_kernel",
        "_cast_kernel",
        "_column_amax_kernel",
        "_expert_scales_kernel",
        "_fp8_swiglu_backward_kernel",
        "_fp8_swiglu_kernel",
        "_largest_kernel",
        "_numbers_kernel",
        "_quantize_blocks_in_registers_kernel",
        "_quantize_blocks_kernel",
        "_quantize_rows_kernel",
        "_requantized_in_registers_kernel",
        "_requantized_kernel",
        "_round_kernel",
        "_transpose_codes_kernel",
        "_transposed_kernel",
        "_unpack_rows_kernel",
    }
)
"""All Triton kernels of kernels/experts/fp8, kernels/formats and kernels/linear but GEMMs. SwiGLU and its backward are
passes for the sake of scales: in bf16 they are part of GEMMs or a smaller pass."""
CAST_OPS = (
    "_to_copy abs amax clamp clone div exp2 floor log2 max mul permute reciprocal slice squeeze t transpose unsqueeze "
    "view"
).split()
"""What a cast consists of. The compiler names kernels by all operations that it has fused, in alphabetical order."""
_COMPILED_CAST = re.compile(rf"triton_(?:poi|red|per)_fused(?:_(?:{'|'.join(CAST_OPS)}))+_\d+")
_MAKES_CODES = re.compile(r"_to_copy_(?:\w+_)?clamp_|_abs_(?:\w+_)?a?max_")
"""A scale has a largest size, and a code is clamped. Copies, products and transposes alone have neither."""


def is_quantisation(name: str) -> bool:
    """Whether a kernel does nothing but quantise, by its name."""
    if name in FP8_KERNELS:
        return True
    return bool(_MAKES_CODES.search(name) and _COMPILED_CAST.fullmatch(name))
