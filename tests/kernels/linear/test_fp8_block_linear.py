"""A linear layer in fp8 by blocks: its GEMMs are those of the definition, and an outlier spoils its block alone."""

from collections.abc import Callable

import pytest
import torch
from support import load
from torch import Tensor

from titan_moe.config.formats import GemmFormats
from titan_moe.kernels.experts.fp8.packed import BLOCK, CODES
from titan_moe.kernels.experts.fp8.rows import quantize_apart, quantize_rows_reference, unpack
from titan_moe.kernels.experts.fp8.weights import quantize_one_way, quantize_weight_reference
from titan_moe.kernels.formats.linear import emulated_linear
from titan_moe.kernels.linear.fp8 import fp8_linear
from titan_moe.kernels.linear.fp8_blocks import fp8_block_linear

of_both = load("kernels/linear/test_fp8_linear")
decibels, gemms, exact_gemms = of_both.decibels, of_both.gemms, of_both.exact_gemms
with_devices = pytest.mark.parametrize(("device", "dtype"), of_both.DEVICES)
FORMATS = GemmFormats(*("fp8_blockwise",) * 3)


def definition(x: Tensor, weight_OI: Tensor) -> Tensor:
    return emulated_linear(x, weight_OI, FORMATS, power_of_two_scales=True)


def draw(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


@with_devices
def test_casts_have_the_bits_of_the_references(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x_MN = draw(device, dtype, 33, 384) * draw(device, torch.float32, 33, 384).mul(9).exp2().to(dtype)
    x_MN[3], x_MN[4], x_MN[6, :BLOCK] = 0.0, 449.0, 0.0
    expected = unpack(quantize_rows_reference(x_MN, BLOCK), BLOCK)
    for ours, theirs in zip(quantize_apart(x_MN, BLOCK), expected, strict=True):
        assert ours.is_contiguous() and torch.equal(ours.float(), theirs.float())
    weight_eOI = draw(device, dtype, 2, 128, 256).mT  # not contiguous
    expected = quantize_weight_reference(weight_eOI, dtype, BLOCK)
    for transposed in (False, True):
        pairs = zip(quantize_one_way(weight_eOI, BLOCK, transposed=transposed), expected[transposed], strict=True)
        assert all(torch.equal(ours.float(), theirs.float()) for ours, theirs in pairs)


@with_devices
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"),
    [(128, 128, 128), (1, 256, 128), (63, 128, 384), (129, 384, 256), (321, 256, 640)],
    ids=str,
)
def test_each_gemm_is_that_of_the_definition(
    num_tokens: int, inputs: int, outputs: int, device: str, dtype: torch.dtype
) -> None:
    """Up to the order of sums; but for gradients of weights, of codes that were rounded twice."""
    torch.manual_seed(0)
    x, weight_OI = draw(device, dtype, num_tokens, inputs), draw(device, dtype, outputs, inputs)
    dy = draw(device, dtype, num_tokens, outputs) * 1e-4
    exact = exact_gemms(x, weight_OI, dy)
    ours, theirs = gemms(fp8_block_linear, x, weight_OI, dy), gemms(definition, x, weight_OI, dy)
    for index, (truth, actual, expected) in enumerate(zip(exact, ours, theirs, strict=True)):
        assert actual.dtype == dtype and actual.shape == expected.shape
        assert decibels(expected, actual) > (45 if device == "cuda" else (60 if index == 2 else 110))
        assert decibels(truth, actual) > 26


@with_devices
def test_factors_of_weight_gradients_are_rounded_twice(device: str, dtype: torch.dtype) -> None:
    """Where tokens differ by 2 ** 16, both roundings matter, and the second one takes little."""
    torch.manual_seed(0)
    x, weight_OI = draw(device, dtype, 256, 256), draw(device, dtype, 128, 256)
    x *= (torch.rand(256, 1, device=device) * 16 - 8).exp2().to(dtype)
    dy = draw(device, dtype, 256, 128) * (torch.rand(256, 128, device=device) * 16 - 8).exp2().to(dtype)
    exact = exact_gemms(x, weight_OI, dy)[2]
    ours, theirs = (gemms(linear, x, weight_OI, dy)[2] for linear in (fp8_block_linear, definition))
    assert decibels(exact, ours) > 26 and decibels(exact, theirs) > 26
    assert decibels(theirs, ours) > 35


@with_devices
def test_an_outlier_spoils_its_block_alone(device: str, dtype: torch.dtype) -> None:
    """Of y, dx and dW: what an outlier's block does not reach stays near fp64, and is lost with scales of rows."""
    torch.manual_seed(0)
    num_tokens, inputs, outputs = 256, 256, 256
    x, weight_OI, dy = (
        draw(device, dtype, *shape) for shape in ((num_tokens, inputs), (outputs, inputs), (num_tokens, outputs))
    )
    # the first block of a row is huge, but y and dx do not depend on it
    x[:, :BLOCK] *= 2.0**20
    dy[:, :BLOCK] *= 2.0**20
    weight_OI[:, :BLOCK] = 0
    of_input = [gemms(linear, x, weight_OI, dy)[0] for linear in (fp8_block_linear, fp8_linear)]
    exact = exact_gemms(x, weight_OI, dy)[0]
    assert decibels(exact, of_input[0]) > 26 and decibels(exact, of_input[1]) < 10
    weight_OI = draw(device, dtype, outputs, inputs)
    weight_OI[:BLOCK] = 0
    of_gradient = [gemms(linear, x, weight_OI, dy)[1] for linear in (fp8_block_linear, fp8_linear)]
    exact = exact_gemms(x, weight_OI, dy)[1]
    assert decibels(exact, of_gradient[0]) > 26 and decibels(exact, of_gradient[1]) < 10
    # the first 128 tokens are huge, but the second 128 inputs' gradients do not depend on them
    x, dy = draw(device, dtype, num_tokens, inputs), draw(device, dtype, num_tokens, outputs)
    dy[:BLOCK] *= 2.0**20
    x[:BLOCK, BLOCK:] = 0
    exact = exact_gemms(x, weight_OI, dy)[2][:, BLOCK:]
    of_weight = [gemms(linear, x, weight_OI, dy)[2][:, BLOCK:] for linear in (fp8_block_linear, fp8_linear)]
    assert decibels(exact, of_weight[0]) > 26 and decibels(exact, of_weight[1]) < 10


@with_devices
def test_results_do_not_depend_on_what_lay_in_memory(device: str, dtype: torch.dtype) -> None:
    """The last tile of tokens is not full, and one more than the tokens need is planned."""
    torch.manual_seed(0)
    x, weight_OI = draw(device, dtype, 130, 128), draw(device, dtype, 384, 128)
    dy = draw(device, dtype, 130, 384)
    first = gemms(fp8_block_linear, x, weight_OI, dy)
    torch.use_deterministic_algorithms(True)  # new memory is then full of NaN
    try:
        again = gemms(fp8_block_linear, x, weight_OI, dy)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


@with_devices
def test_backward_keeps_codes_of_the_input_and_the_weight(device: str, dtype: torch.dtype) -> None:
    x, weight_OI = (draw(device, dtype, *shape).requires_grad_() for shape in ((64, 256), (128, 256)))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda it: it):
        fp8_block_linear(x, weight_OI)
    codes_TI, scales_Ti, weight = kept
    assert (codes_TI.dtype, codes_TI.shape, scales_Ti.shape) == (CODES, x.shape, (64, 2))
    assert weight.data_ptr() == weight_OI.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("mean", [0.0, 0.5])
@pytest.mark.parametrize("linear", [fp8_block_linear, fp8_linear])
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "outputs"),
    [
        (4096, 7168, 1536),
        (4000, 1536, 24_576),
        (4097, 512, 4096),
        (16_384, 512, 4096),
        (2048, 18_432, 7168),
        (1, 4096, 6144),
    ],
    ids=str,
)
def test_layers_of_full_size_are_near_fp64(
    num_tokens: int, inputs: int, outputs: int, linear: Callable[[Tensor, Tensor], Tensor], mean: float
) -> None:
    """Sums of rowwise layers have the matrix units' 14 bits, over all of I, O or T."""
    if linear is fp8_linear and num_tokens % 16:
        pytest.skip("a rowwise layer needs multiples of 16 tokens")
    torch.manual_seed(0)
    x, weight_OI, dy = (
        draw("cuda", torch.bfloat16, *shape)
        for shape in ((num_tokens, inputs), (outputs, inputs), (num_tokens, outputs))
    )
    x, dy = x + mean, dy + mean
    first = gemms(linear, x, weight_OI, dy)
    for exact, actual in zip(exact_gemms(x, weight_OI, dy), first, strict=True):
        assert decibels(exact, actual) > 26
    assert all(map(torch.equal, first, gemms(linear, x, weight_OI, dy)))


@pytest.mark.gpu
def test_replayed_layers_have_the_bits_of_eager_ones() -> None:
    torch.manual_seed(0)
    x, weight_OI = (draw("cuda", torch.bfloat16, *shape).requires_grad_() for shape in ((1000, 768), (1024, 768)))
    dy = draw("cuda", torch.bfloat16, 1000, 1024)

    def evaluate() -> list[Tensor]:
        y = fp8_block_linear(x, weight_OI)
        return [y.detach(), *torch.autograd.grad(y, [x, weight_OI], dy)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        evaluate()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = evaluate()
    with torch.no_grad():
        for tensor in (x, weight_OI, dy):
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    assert all(map(torch.equal, replayed, evaluate()))


def test_widths_of_no_whole_block_are_refused() -> None:
    for inputs, outputs in ((128, 64), (192, 128)):
        with pytest.raises(ValueError, match=f"multiples of 128, not {inputs} and {outputs}; take precision.linears"):
            fp8_block_linear(torch.randn(4, inputs), torch.randn(outputs, inputs))
