"""Time a whole MoE layer, router to combine, on one GPU in bf16, beside the plain composite and torchtitan's layer.

    python tools/bench_layer.py [--shapes qwen3 mixtral] [--candidates fused torchtitan] [--skew 3] [--rest 1]

TFLOP/s are model FLOPs of the experts, routed and shared: 6 * slots * width * hidden in forward, three times that with
backward. The router is timed but not counted. Inputs are random, and so is the router's selection. For skewed routing a
bias gives the most loaded expert `--skew` times the mean load, if possible. Gradients are those of the input and of all
weights. `composite` is the same layer as one graph of torch.compile with fixed routing; the column "before" was
measured with it. `fused_fp8` has routed experts in fp8. All layers have the same weights. The relative error of the
output against that of the first candidate is printed (torchtitan computes scores in bf16, so near ties may select other
experts).
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from layer_candidates import CANDIDATES, LayerShape, Pair
from torch import Tensor, nn

from titan_moe.kernels.timing import Stopwatch, median_ms

SEQUENCE_TOKENS = 4096
SAVED_TARGET = 1.1


SHAPES = {
    "qwen3": LayerShape(32_768, 2048, 768, 128, 8, Pair(500, 500), Pair(405, 433)),
    "qwen3_ep8": LayerShape(16_384, 2048, 768, 16, 8, Pair(530, 520), Pair(457, 454)),
    "deepseek_v2_lite": LayerShape(32_768, 2048, 1408, 64, 6, Pair(570, 550), Pair(519, 506), 2 * 1408),
    "mixtral": LayerShape(16_384, 4096, 14_336, 8, 2, Pair(640, 620), Pair(615, 591)),
    "deepseek_v3_ep8": LayerShape(8_192, 7168, 2048, 32, 8, Pair(600, 580), Pair(469, 466)),
}
SMOKE = {"smoke": LayerShape(64, 32, 16, 8, 2, Pair(1, 1), Pair(1, 1), 2 * 16)}


def draw_weights(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights, scaled so that activations keep their scale."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return (torch.randn(sizes, device=device, generator=generator) / sizes[-1] ** 0.5).to(dtype)

    weights = {
        "router.weight": normal(shape.experts, shape.width),
        "router.expert_bias_E": torch.zeros(shape.experts, device=device),
        "experts.gate_up": normal(shape.experts, 2, shape.hidden, shape.width),
        "experts.down": normal(shape.experts, shape.width, shape.hidden),
    }
    if shape.shared_hidden:
        weights["shared_experts.gate_up.weight"] = normal(2 * shape.shared_hidden, shape.width)
        weights["shared_experts.down.weight"] = normal(shape.width, shape.shared_hidden)
    return weights


def draw_input(shape: LayerShape, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Sequences of 4,096 tokens."""
    generator = torch.Generator(device).manual_seed(1)
    sizes = (-1, min(SEQUENCE_TOKENS, shape.tokens), shape.width)
    return torch.randn(shape.tokens, shape.width, device=device, generator=generator).to(dtype).view(sizes)


def loads_of(scores_TE: Tensor, bias_E: Tensor, choices: int) -> Tensor:
    """Slots of each expert over the mean."""
    ids = (scores_TE + bias_E).topk(choices).indices
    counts_E = torch.bincount(ids.flatten(), minlength=scores_TE.shape[1]).double()
    return counts_E / counts_E.mean()


def bias_for_load(scores_TE: Tensor, choices: int, wanted_load: float) -> Tensor:
    """A bias that decreases linearly over experts in random order, so that the most loaded one has the wanted load.

    The load is relative to the mean. It is at most E / K, which is all tokens.
    """
    num_experts = scores_TE.shape[1]
    wanted_load = min(wanted_load, 0.95 * num_experts / choices)
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(2)).to(scores_TE.device)
    decreasing_E = torch.linspace(1, 0, num_experts, device=scores_TE.device)[order]
    low, high = 0.0, 2.0
    for _ in range(30):
        middle = (low + high) / 2
        if loads_of(scores_TE, middle * decreasing_E, choices).max() < wanted_load:
            low = middle
        else:
            high = middle
    return high * decreasing_E


def scores_of(weights: dict[str, Tensor], x_BND: Tensor) -> Tensor:
    """The scores of the router, equal for all layers."""
    return F.linear(x_BND.flatten(0, 1).float(), weights["router.weight"].float()).softmax(-1)


def measure(layer: nn.Module, x_BND: Tensor, stopwatch: Stopwatch) -> Pair:
    """Milliseconds of forward, and of forward and backward."""
    x_BND = x_BND.detach().requires_grad_()
    inputs = [x_BND, *layer.parameters()]
    grad_BND = torch.randn_like(x_BND)

    def both() -> None:
        torch.autograd.grad(layer(x_BND), inputs, grad_BND)

    both()
    return Pair(stopwatch(lambda: layer(x_BND)), stopwatch(both))


def measure_saved_bytes(layer: nn.Module, x_BND: Tensor) -> tuple[Tensor, int]:
    """The output, and the bytes that autograd saves for it: distinct storages, without weights and buffers."""
    state = [*layer.parameters(), *layer.buffers()]
    state_ptrs = {tensor.untyped_storage().data_ptr() for tensor in state}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in state_ptrs:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_BND = layer(x_BND.detach().requires_grad_())  # keeps all saved storages alive, so addresses are unique
    return y_BND.detach(), sum(saved.values())


@dataclass
class Result:
    """A candidate at one shape with one routing."""

    shape: str
    routing: str
    candidate: str
    tflops: Pair
    saved_ratio: float
    """Bytes saved for backward over the minimum."""
    error: float
    """Relative error of the output against the first candidate's."""


class Bench:
    """Run all measurements. Failures and measurements skipped for lack of time are printed."""

    def __init__(self, device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch, seconds: float) -> None:
        self.device, self.dtype, self.stopwatch = device, dtype, stopwatch
        self.compiled = "on_cuda"
        self.deadline = time.monotonic() + seconds
        self.results: list[Result] = []

    def run(self, shapes: dict[str, LayerShape], candidates: list[str], skew: float) -> None:
        """Measure all shapes and print one line per measurement."""
        for name, shape in shapes.items():
            with errors_printed(name):
                self.measure_shape(name, shape, candidates, skew)
            torch._dynamo.reset()  # otherwise the next shape would get graphs with symbolic sizes

    def measure_shape(self, name: str, shape: LayerShape, candidates: list[str], skew: float) -> None:
        """Measure all candidates at one shape. Each is built once and timed with both routings."""
        weights, x_BND = draw_weights(shape, self.device, self.dtype), draw_input(shape, self.device, self.dtype)
        scores_TE = scores_of(weights, x_BND)
        biases = {"even": torch.zeros_like(scores_TE[0]), "skewed": bias_for_load(scores_TE, shape.choices, skew)}
        for routing, bias_E in biases.items():
            loads_E = loads_of(scores_TE, bias_E, shape.choices)
            print(f"{name} {routing}: max/mean load {loads_E.max():.2f}, min/mean {loads_E.min():.2f}", flush=True)
        del scores_TE
        expected: dict[str, Tensor] = {}
        for candidate in candidates:
            if time.monotonic() > self.deadline:
                print(f"{name} {candidate}: skipped, no time left", flush=True)
                continue
            # torchtitan enables this setting permanently
            with errors_printed(f"{name} {candidate}"), torch._dynamo.config.patch(capture_scalar_outputs=False):
                layer, set_bias = CANDIDATES[candidate](weights, shape, x_BND, self.compiled)
                for routing, bias_E in biases.items():
                    set_bias(bias_E)
                    self.measure_candidate(name, routing, candidate, shape, layer, x_BND, expected)

    def measure_candidate(
        self,
        name: str,
        routing: str,
        candidate: str,
        shape: LayerShape,
        layer: nn.Module,
        x_BND: Tensor,
        expected: dict[str, Tensor],
    ) -> None:
        """Measure one candidate with one routing."""
        y_BND, saved_bytes = measure_saved_bytes(layer, x_BND)
        reference_BND = expected.setdefault(routing, y_BND)
        error = ((y_BND - reference_BND).norm() / reference_BND.norm()).item()
        del y_BND
        ms = measure(layer, x_BND, self.stopwatch)
        flops = shape.forward_flops
        tflops = Pair(flops / ms.forward / 1e9, 3 * flops / ms.total / 1e9)
        saved_ratio = saved_bytes / (shape.saved_elements * self.dtype.itemsize)
        self.results.append(Result(name, routing, candidate, tflops, saved_ratio, error))
        print(
            f"{name} {routing} {candidate}: {ms.forward:.3f} ms, {ms.total:.3f} ms with backward, {tflops} TFLOP/s; "
            f"saves {saved_bytes / 2**30:.3f} GiB; error of the output {error:.1e}",
            flush=True,
        )


@contextmanager
def errors_printed(part: str) -> Iterator[None]:
    """Print an error instead of raising it, and free the memory of the failed part."""
    try:
        yield
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        print(f"{part}: failed: {type(error).__name__}: {first_line[:300]}", flush=True)
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def table(results: list[Result], shapes: dict[str, LayerShape]) -> Iterator[str]:
    """A row for each shape and routing. Skewed rows also have the percentage of the even one."""
    by_key = {(result.shape, result.routing, result.candidate): result for result in results}
    candidates = list(dict.fromkeys(result.candidate for result in results))
    yield (
        f"{'TFLOP/s, fwd/fwd+bwd':26}" + "".join(f"{name:>18}" for name in candidates) + f"{'target':>12}{'before':>12}"
    )
    for name, shape in shapes.items():
        for routing in ("even", "skewed"):
            cells = [_cell(by_key, name, routing, candidate) for candidate in candidates]
            tail = f"{shape.target!s:>12}{shape.before!s:>12}" if routing == "even" else ""
            yield f"{name + ' ' + routing:26}" + "".join(f"{cell:>18}" for cell in cells) + tail
    yield f"{'saved / (2TD + 4TKF)':26}" + f"target {SAVED_TARGET}"
    for name in shapes:
        ratios = [by_key.get((name, "even", candidate)) for candidate in candidates]
        cells = [f"{result.saved_ratio:.2f}" if result else "-" for result in ratios]
        yield f"{name:26}" + "".join(f"{cell:>18}" for cell in cells)


def _cell(by_key: dict[tuple[str, str, str], Result], name: str, routing: str, candidate: str) -> str:
    result, even = by_key.get((name, routing, candidate)), by_key.get((name, "even", candidate))
    if result is None:
        return "-"
    if routing == "even" or even is None:
        return str(result.tflops)
    shares = (100 * a / b for a, b in zip(result.tflops, even.tflops, strict=True))
    return f"{result.tflops} {'/'.join(f'{share:.0f}' for share in shares)}%"


def median_after_rest_ms(seconds: float, call: Callable[[], Any]) -> float:
    """The median after a pause. GEMMs bring a GPU to its power limit within 0.1 s, which reduces its clock."""
    torch.cuda.synchronize()
    time.sleep(seconds)
    return median_ms(call)


def wall_clock_ms(call: Callable[[], Any]) -> float:
    """One call by the host's clock, for the smoke test."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--candidates", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--skew", type=float, default=3.0, help="load of the most loaded expert over the mean")
    parser.add_argument("--seconds", type=float, default=225, help="no measurement starts later")
    parser.add_argument("--rest", type=float, default=0.0, help="idle seconds before each measurement")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer in fp32 on the CPU, to test the script")
    args = parser.parse_args()
    if args.smoke:
        bench = Bench(torch.device("cpu"), torch.float32, wall_clock_ms, args.seconds)
        shapes = SMOKE
    elif torch.cuda.is_available():
        bench = Bench(torch.device("cuda"), torch.bfloat16, partial(median_after_rest_ms, args.rest), args.seconds)
        shapes = {name: SHAPES[name] for name in args.shapes}
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    else:
        parser.error("needs a GPU; --smoke runs a tiny layer on the CPU")
    bench.run(shapes, args.candidates, args.skew)
    for line in table(bench.results, shapes):
        print(line)


if __name__ == "__main__":
    main()
