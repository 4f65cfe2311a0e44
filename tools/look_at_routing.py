"""Look at what the routers of a recipe's model read before the first step, and how they route it.

    python tools/look_at_routing.py RECIPE [--set model.embedding_init_std=0.02 ...] [--layers 24] [--device cuda]
        [--tokens 16384]

The model is built in one process with the local dispatcher and the recipe's initial weights, in `precision.compute`
(masters too), and runs one forward, eagerly, on the recipe's first tokens. `--layers` builds the first ones of the
recipe's model. A line a layer: RMS of the residual stream before the block and of the attention output; the percentage
of the direction common to all tokens in both and in the router's input; experts without a token; the busiest expert
over the mean, and that over E/K, its largest value. The last line is that of the log of a run's first step, with the
overload factors of the recipe's ep ranks.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from titan_moe.config import Recipe, RecipeError, load_recipe, refusals
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.data.loader import build_loader
from titan_moe.layers.attention import attention_backend
from titan_moe.layers.init import init_weights
from titan_moe.metrics.console import format_start
from titan_moe.metrics.meter import routing_record
from titan_moe.metrics.router_input import LayerSignals, Signal, observe_forward
from titan_moe.training.build import build_on_meta

HEADER = """\
                 rms         common direction: all tokens / in a sequence
layer  residual  attention     residual    attention  router input     idle    load  of E/K"""


def main(argv: Sequence[str]) -> list[LayerSignals]:
    args = _parser().parse_args(argv)
    recipe = load_recipe(args.recipe, [f"--{setting}" for setting in args.set])
    device, ep = torch.device(args.device), recipe.parallel.ep
    recipe = on_one_process(recipe, args.tokens)
    model = build(recipe, args.layers, device)
    inputs = first_tokens(recipe, device)
    with attention_backend(recipe.perf.attention):
        loss, layers = observe_forward(model, *inputs)
    print("\n".join(table(layers, recipe.model.moe.num_experts / recipe.model.moe.top_k)))
    print(f"loss {loss / inputs[0].numel():.4f}")
    counts = {f"layers.{s.layer}": s.tokens_per_expert_E for s in layers if s.tokens_per_expert_E is not None}
    if counts:
        print(format_start(routing_record(counts, ep), sum(map(len, counts.values()))))
    return layers


def on_one_process(recipe: Recipe, num_tokens: int) -> Recipe:
    """The recipe with one microbatch of `num_tokens` (0: its own), nothing parallel or compiled, and narrow masters.

    Raises: RecipeError if it breaks a rule.
    """
    train = recipe.train
    seq_len = min(train.seq_len_tokens, num_tokens or train.seq_len_tokens)
    num_sequences = num_tokens // seq_len or train.micro_batch_sequences
    recipe = replace(
        recipe,
        parallel=ParallelConfig(),
        compile=CompileConfig("off"),
        validation=replace(recipe.validation, every_steps=0),
        metrics=replace(recipe.metrics, sample_tokens=0),
        precision=replace(recipe.precision, master=recipe.precision.compute, moments=recipe.precision.compute),
        optim=replace(recipe.optim, kind="fused_adamw"),  # no step is taken; narrow masters are refused for others
        train=replace(
            train,
            seq_len_tokens=seq_len,
            global_batch_sequences=num_sequences,
            micro_batch_sequences=num_sequences,
        ),
    )
    if problems := refusals(recipe, 1):
        raise RecipeError(problems)
    return recipe


def build(recipe: Recipe, num_layers: int, device: torch.device) -> nn.Module:
    """The model with its initial weights, or its first layers (0: all), with the deviations of the whole model."""
    shape = recipe.model
    first = replace(shape, num_layers=min(num_layers or shape.num_layers, shape.num_layers))
    model = build_on_meta(replace(recipe, model=first)).to_empty(device=device)
    if shape.embeddings_are_tied:
        model.head.weight = model.embed.weight  # to_empty makes two of a shared parameter
    stds = {"std": shape.init_std, "embedding_std": shape.embedding_init_std}
    init_weights(model, recipe.run.seed, num_layers=shape.num_layers, **stds)
    return model.eval()


def first_tokens(recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, labels and document ids of the first microbatch."""
    loader = build_loader(recipe, 0, 1, recipe.run.folder, lambda: None)
    return next(loader.next_step().to(device).microbatches())


def table(layers: Sequence[LayerSignals], largest_load: float) -> Iterator[str]:
    """A line a layer."""
    yield HEADER
    for s in layers:
        common = f"{_common(s.residual)}  {_common(s.attention)}"
        line = f"{s.layer:>5}  {s.residual.rms:8.4f}  {s.attention.rms:9.4f}  {common}"
        if s.router is not None and s.tokens_per_expert_E is not None:
            idle = f"{s.num_idle}/{len(s.tokens_per_expert_E)}"
            line += f"  {_common(s.router):>12}  {idle:>7}  {s.load:6.2f}  {s.load / largest_load:6.1%}"
        yield line


def _common(signal: Signal) -> str:
    return f"{100 * signal.common:4.1f} /{100 * signal.common_in_sequence:5.1f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="overrides of the recipe"
    )
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0: all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of the forward; 0: a microbatch of the recipe")
    return parser


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except RecipeError as error:
        sys.exit("\n".join(error.problems))
