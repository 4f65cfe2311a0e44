"""Time operations at full size, beside other implementations and their roofline.

    python tools/bench_kernels.py [fused_expert_mlp ...] [--shape qwen3_ep8]

Medians over random bf16 data, with each call replayed as a CUDA graph. The roofline of a call is the larger of its
FLOPs over the device's peak in bf16 and its bytes over the peak bandwidth, both from data sheets. The percentage is
roofline over time. It is that of bf16 for operations in fp8 too, so that both compare, and can exceed 100 %.
"""

import argparse
from collections.abc import Iterator

import torch
from benchmark_case import Benchmark
from kernel_benchmarks import BENCHMARKS

from titan_moe.kernels.timing import forward_and_total_ms
from titan_moe.plan.choice.hardware import Hardware, find_hardware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(BENCHMARKS)}; default all")
    parser.add_argument("--shape", help="only the cases of this name")
    args = parser.parse_args()
    unknown = set(args.kernels) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmarks for {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    hardware = find_hardware(torch.cuda.get_device_name())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in args.kernels or BENCHMARKS:
        for shape in BENCHMARKS[name].cases:
            if args.shape in (None, shape):
                for line in compare(f"{name}/{shape:17}", BENCHMARKS[name], shape, hardware):
                    print(line, flush=True)


def compare(title: str, benchmark: Benchmark, shape: str, hardware: Hardware | None) -> Iterator[str]:
    """A line for each implementation."""
    case = benchmark.cases[shape]
    sample = case.draw(torch.device("cuda"))
    for name, op in benchmark.ops.items():
        try:
            forward_ms, total_ms = forward_and_total_ms(op, sample)
        except RuntimeError as error:
            yield f"{title} {name:22} failed: {str(error).splitlines()[0][:80]}"
            continue
        forward = describe(forward_ms, case.forward_flops, case.forward_bytes, hardware)
        total = describe(total_ms, case.total_flops, case.total_bytes, hardware)
        yield f"{title} {name:22} fwd {forward}   fwd+bwd {total}"


def describe(ms: float, flops: float, num_bytes: float, hardware: Hardware | None) -> str:
    """Time, rate and share of the roofline."""
    rate = f"{flops / ms / 1e9:5.0f} TFLOP/s" if flops else f"{num_bytes / ms / 1e6:5.0f} GB/s   "
    if hardware is None:
        return f"{ms:8.3f} ms {rate}"
    roofline_ms = 1e3 * max(flops / hardware.bf16_flops, num_bytes / hardware.memory_bytes_per_second)
    return f"{ms:8.3f} ms {rate} {roofline_ms / ms:4.0%}"


if __name__ == "__main__":
    main()
