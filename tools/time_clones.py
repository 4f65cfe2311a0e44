"""Time whole optimizer steps without clones, and with `expert_clones = "auto"`, under loads of hot experts.

    torchrun --nproc-per-node 2 tools/time_clones.py recipes/qwen3_30b_a3b.toml --parallel.ep=2 --model.num_layers=12 \\
        --train.global_batch_sequences=8 --out lines.json

A phase has a forced load: every token takes so many hot experts, all on the first rank, and for its other choices those
of forced balance. With 1.25 every token takes one, and each fourth token another. With "auto" clones are switched on
and off as in a run. The figures of a phase are of the second half of its steps. Each setting of
`parallel.expert_clones` runs all phases, one setting after the other in the same processes. A line of JSON for each
setting and phase is printed, and appended to the file.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cleanup import destroy_subgroups, free_memory
from measurement import facts_of, max_over_ranks
from rank_processes import append_result, reporting_errors
from time_steps import open_data, read_batches, synchronised_time
from torch import Tensor

from titan_moe.config import Recipe, RecipeError, load_recipe, refusals
from titan_moe.config.model import MoEConfig
from titan_moe.config.parse import split_overrides
from titan_moe.layers.attention import attention_backend
from titan_moe.layers.forced_routing import ForcedBalance, ForcedTable
from titan_moe.run.process import process_group
from titan_moe.training.build import assemble
from titan_moe.training.resolve_auto import resolve_auto


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--clones", nargs="+", default=["off", "auto"], help="values of parallel.expert_clones")
    parser.add_argument("--hot", nargs="+", type=float, default=[0, 1, 2, 3, 4, 0, 0, 0], help="hot experts, by phase")
    parser.add_argument("--steps", type=int, default=24, help="steps of a phase")
    parser.add_argument("--out", type=Path, required=True, help="file for lines of JSON")
    args, others = parser.parse_known_args()
    overrides = split_overrides(others)[0]
    recipes = {c: load_recipe(args.recipe, [*overrides, f"--parallel.expert_clones={c}"]) for c in args.clones}
    run = next(iter(recipes.values())).run
    with reporting_errors(args.out, args.clones), process_group(run) as device:
        for clones, recipe in recipes.items():
            with reporting_errors(args.out, [clones]):
                for line in time_phases(recipe, device, args.hot, args.steps, args.out.parent):
                    if dist.get_rank() == 0:
                        append_result(args.out, [clones], line | facts_of(device))
                        print(clones, line, flush=True)
                free_memory(device)
                destroy_subgroups()


def hot_table(config: MoEConfig, num_hot: float, device: torch.device) -> Tensor:
    """The experts of a table of tokens [T, K]: the first ones in every token's choice, then those of forced balance. A
    fraction is that of the tokens, spread evenly, which have one hot expert more."""
    fewer, share = divmod(num_hot, 1)
    table_TK, more_TK = (_table_of(config, int(number), device) for number in (fewer, fewer + (share > 0)))
    so_far_T = (torch.arange(len(table_TK) + 1, device=device) * share).floor()
    return torch.where(so_far_T.diff()[:, None] > 0, more_TK, table_TK)


def _table_of(config: MoEConfig, num_hot: int, device: torch.device) -> Tensor:
    table_TK = ForcedBalance(config, device).table_TK
    hot_TK = torch.arange(num_hot, device=device).expand(len(table_TK), -1)
    # those of forced balance that are not hot come first, in their order
    order_TK = (table_TK < num_hot).int().argsort(dim=1, stable=True)
    return torch.cat([hot_TK, table_TK.gather(1, order_TK)], dim=1)[:, : config.top_k]


def time_phases(
    recipe: Recipe, device: torch.device, hot: list[float], num_steps: int, folder: Path
) -> list[dict[str, Any]]:
    """Take the steps of all phases; the figures of each."""
    recipe = replace(recipe, run=replace(recipe.run, device=device.type))
    recipe = replace(recipe, train=replace(recipe.train, steps=num_steps * len(hot)))
    if problems := refusals(recipe, dist.get_world_size()):
        raise RecipeError(problems)
    recipe = resolve_auto(recipe, device)
    torch.manual_seed(recipe.run.seed)
    assembly = assemble(recipe, device)
    runner, moe = assembly.step, recipe.model.moe
    force = ForcedTable(hot_table(moe, 0, device))
    for router in runner.step.balancer.routers.values():
        router.force = force
    loader = open_data(recipe, assembly.meshes, folder)
    batches = iter(read_batches(recipe, assembly.meshes, loader, device))
    num_tokens = recipe.train.global_batch_sequences * recipe.train.seq_len_tokens // dist.get_world_size()
    lines = []
    try:
        with attention_backend(recipe.perf.attention):
            for num_hot in hot:
                force.table_TK.copy_(hot_table(moe, num_hot, device))  # in place: a recording reads it too
                step_ms, reruns_before = [], runner.num_reruns
                for _ in range(num_steps):
                    batch, start = next(batches), synchronised_time(device)
                    result = runner(batch)
                    step_ms += max_over_ranks([1e3 * (synchronised_time(device) - start)], device)
                median_ms = statistics.median(step_ms[num_steps // 2 :])
                lines.append(
                    {
                        "hot_experts": num_hot,
                        "tokens_per_second_per_gpu": num_tokens / median_ms * 1e3,
                        "median_step_ms": median_ms,
                        "slowest_step_ms": max(step_ms),
                        "replica_slots_in_use": runner.step.replicas.number_in_use,
                        "imbalance": float(result.metrics.get("imbalance", 1.0)),
                        "needed_factor": runner.needed_factor,
                        "num_reruns": runner.num_reruns - reruns_before,
                        "loss": result.loss.item(),
                    }
                )
    finally:
        runner.release()  # NCCL does not shut down while a graph contains its collectives
    return lines


if __name__ == "__main__":
    main()
