"""Time whole optimizer steps of a recipe on this host's GPUs, beside torchtitan's own Trainer on as many tokens.

    python tools/bench_train.py recipes/qwen3_30b_a3b.toml --nproc 8 --peer [--section.key=value ...]

Each candidate runs in processes of its own, ours first. A step is timed on the host between device synchronisations,
the slowest rank counts; the figure is the median of the steps after warm-up. Data is random tokens made before the
clock starts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

PEER = Path(__file__).with_name("peer_torchtitan.py")
PEER_MODELS = {"qwen3_30b_a3b": "qwen3_30b_a3b", "deepseek_v2_lite": "deepseek_v2_lite"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--peer", action="store_true", help="run torchtitan's Trainer too")
    parser.add_argument("--peer-args", default="", help="further arguments of peer_torchtitan.py, in one string")
    parser.add_argument("--out", type=Path, help="JSON file for all results")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.worker:
        run_worker(args, overrides)
        return
    results = {
        "titan_moe": _launch(
            args, [__file__, args.recipe, f"--steps={args.steps}", f"--warmup={args.warmup}", *overrides], "--worker"
        )
    }
    if args.peer:
        results["torchtitan"] = _launch(args, [str(PEER), *_peer_args(args, results["titan_moe"])], "--out")
    _print(results)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


def run_worker(args: argparse.Namespace, overrides: list[str]) -> None:
    """One rank of our own candidate."""
    import torch
    import torch.distributed as dist

    from titan_moe.config.parse import load_recipe
    from titan_moe.train.process import process_group
    from titan_moe.train.settle import settle_kernels

    recipe = load_recipe(args.recipe, overrides)
    recipe = replace(recipe, train=replace(recipe.train, steps=args.steps + args.warmup))
    with process_group(recipe.run) as device:
        recipe = settle_kernels(recipe, device)
        result = measure(recipe, device, args.warmup)
        if dist.get_rank() == 0:
            result |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "overrides": overrides}
            result |= {"kernels": asdict(recipe.perf.chosen_kernels)}
            args.worker.write_text(json.dumps(result))


def measure(recipe: Any, device: Any, warmup: int) -> dict[str, Any]:
    """Build the run as the trainer does and time its steps."""
    import torch
    import torch.distributed as dist

    from titan_moe.data.packing import Batch
    from titan_moe.layers.attention import attention_backend
    from titan_moe.plan.count import count
    from titan_moe.train.build import assemble

    train, num_ranks = recipe.train, dist.get_world_size()
    step = assemble(recipe, device).step
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    shape = (-1, train.micro_batch_sequences, train.seq_len_tokens)
    num_mine = train.global_batch_sequences // num_ranks * train.seq_len_tokens
    tokens = torch.randint(recipe.model.vocab_size, (num_mine,), device=device, generator=generator).view(shape)
    batch = Batch(tokens, tokens.roll(-1, -1), None)
    step_ms, losses = [], []
    with attention_backend(recipe.perf.attention):
        for index in range(train.steps):
            if index == warmup:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            result = step(batch)
            torch.cuda.synchronize()
            slowest = torch.tensor(time.perf_counter() - begin, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            step_ms.append(1e3 * slowest.item())
            losses.append(result.loss.item())
    median_ms = statistics.median(step_ms[warmup:])
    tokens_per_second = num_mine / median_ms * 1e3
    flops = count(recipe.model, train.seq_len_tokens).flops_per_token
    return {
        "tokens_per_second_per_gpu": tokens_per_second,
        "tflops_per_gpu": tokens_per_second * flops / 1e12,
        "median_step_ms": median_ms,
        "step_ms": step_ms,
        "losses": losses,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "num_gpus": num_ranks,
        "num_layers": recipe.model.num_layers,
        "seq_len_tokens": train.seq_len_tokens,
        "sequences_per_gpu": train.global_batch_sequences // num_ranks,
        "micro_batch_sequences": train.micro_batch_sequences,
        "ep": recipe.parallel.ep,
        "dispatcher": recipe.parallel.dispatcher,
        "recompute": recipe.memory.recompute,
        "forced_balance": train.force_balanced_routing,
    }


def _peer_args(args: argparse.Namespace, ours: dict[str, Any]) -> list[str]:
    """The same model, depth, tokens and expert parallelism for the peer."""
    routing = "--forced-balance" if ours.get("forced_balance", True) else "--natural"
    common = [f"--model={PEER_MODELS[Path(args.recipe).stem]}", f"--steps={args.steps + args.warmup}", routing]
    shape = [f"--warmup={args.warmup}", f"--num-layers={ours['num_layers']}", f"--seq={ours['seq_len_tokens']}"]
    return [*common, *shape, f"--batch={ours['sequences_per_gpu']}", f"--ep={ours['ep']}", *args.peer_args.split()]


def _launch(args: argparse.Namespace, command: list[str], out_flag: str) -> dict[str, Any]:
    """Run one candidate under torchrun; a failure is a result too."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc}"]
        environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} | os.environ
        finished = subprocess.run([*torchrun, *command, f"{out_flag}={out}"], env=environment)
        if not out.exists():
            return {"error": f"exit code {finished.returncode}"}
        return json.loads(out.read_text())


def _print(results: dict[str, dict[str, Any]]) -> None:
    for name, result in results.items():
        if "error" in result:
            print(f"{name:12} failed: {result['error']}")
            continue
        figures = f"{result['tokens_per_second_per_gpu']:9,.0f} tokens/s/GPU  {result['median_step_ms']:8.1f} ms"
        print(f"{name:12} {figures}  peak {result['peak_memory_gib']:6.1f} GiB")
    both = [r["tokens_per_second_per_gpu"] for r in results.values() if "error" not in r]
    if len(both) == 2:
        print(f"ratio {both[0] / both[1]:.2f}")


if __name__ == "__main__":
    main()
