"""Time every registered operation that names benchmarks, beside its baselines and its floor.

    python tools/bench_kernels.py [fused_expert_mlp ...] [--shape qwen3_ep8]

Medians over fresh random bf16 data, each call replayed as a CUDA graph. The floor of a call is the larger of its FLOPs
over the device's peak and its bytes over the peak bandwidth, both from data sheets; share is floor over time.
"""

import argparse
from collections.abc import Iterator

import torch

from titan_moe.kernels.registry import Benchmark, Kernel, load_all
from titan_moe.kernels.timing import forward_and_total_ms
from titan_moe.plan.hardware import Hardware, find_hardware


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kernels = {name: kernel for name, kernel in load_all().items() if kernel.benchmarks}
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(kernels)}; all if none is named")
    parser.add_argument("--shape", help="only the benchmarks of this name")
    args = parser.parse_args()
    unknown = set(args.kernels) - set(kernels)
    if unknown:
        parser.error(f"no benchmarks for {', '.join(sorted(unknown))}; there are {', '.join(kernels)}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure")
    hardware = find_hardware(torch.cuda.get_device_name())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in args.kernels or kernels:
        for benchmark in kernels[name].benchmarks:
            if args.shape in (None, benchmark.name):
                for line in compare(kernels[name], benchmark, hardware):
                    print(line, flush=True)


def compare(kernel: Kernel, benchmark: Benchmark, hardware: Hardware | None) -> Iterator[str]:
    """A line for the operation and one for each rival."""
    sample = benchmark.draw(torch.device("cuda"))
    for name, op in {"titan_moe": kernel.op, **kernel.baselines}.items():
        try:
            forward_ms, total_ms = forward_and_total_ms(op, sample)
        except RuntimeError as error:
            yield f"{kernel.name}/{benchmark.name:17} {name:22} failed: {str(error).splitlines()[0][:80]}"
            continue
        forward = describe(forward_ms, benchmark.forward_flops, benchmark.forward_bytes, hardware)
        total = describe(total_ms, benchmark.total_flops, benchmark.total_bytes, hardware)
        yield f"{kernel.name}/{benchmark.name:17} {name:22} fwd {forward}   fwd+bwd {total}"


def describe(ms: float, flops: float, num_bytes: float, hardware: Hardware | None) -> str:
    """Time, rate and share of the floor."""
    rate = f"{flops / ms / 1e9:5.0f} TFLOP/s" if flops else f"{num_bytes / ms / 1e6:5.0f} GB/s   "
    if hardware is None:
        return f"{ms:8.3f} ms {rate}"
    floor_ms = 1e3 * max(flops / hardware.bf16_flops, num_bytes / hardware.memory_bytes_per_second)
    return f"{ms:8.3f} ms {rate} {floor_ms / ms:4.0%}"


if __name__ == "__main__":
    main()
