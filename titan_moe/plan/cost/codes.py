"""GPU memory of frozen weights that are stored as codes (adapters/stored.py)."""

from collections.abc import Iterator

from titan_moe.config.adapter import kind_of_linear, scales_of_codes
from titan_moe.config.modules import Module, modules_of
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe
from titan_moe.config.trainable import passes_of
from titan_moe.plan.pipeline.parts import RankPart

BYTES_OF_SCALE = 4


def stored_modules(part: RankPart) -> Iterator[tuple[Module, int]]:
    """The modules of a pipeline rank whose weights are codes, and how many there are of each. A rank has those of its
    routed experts, and of linear layers all."""
    model, patterns = part.recipe.model, part.recipe.optim.trainable
    if not model.adapter.has_codes:
        return
    passes = passes_of(model, patterns)
    for row in part.count.modules:
        if not row.is_adapter and row.layers is not None and can_be_codes(row):
            yield row, sum(passes[row.path, layer].share == 0 for layer in row.layers)


def can_be_codes(row: Module) -> bool:
    """Whether a weight is one that is stored as codes, where a recipe stores any."""
    return row.part == "experts" or (row.part is not None and kind_of_linear(row.path) is not None)


def stored_numbers(part: RankPart, *, of_experts: bool) -> float:
    """How many weights of a rank are codes."""
    return sum(
        it.own_parameters * number for it, number in stored_modules(part) if (it.part == "experts") == of_experts
    )


def code_bytes(part: RankPart) -> float:
    """The bytes of codes and scales of a rank."""
    base = part.recipe.model.adapter.base
    scales = 0.0
    for row, number in stored_modules(part):
        width, hidden = row.widths
        if row.part == "experts":
            of_one = 2 * scales_of_codes(hidden, width, base) + scales_of_codes(width, hidden, base)
            scales += number * part.recipe.model.moe.num_experts / max(part.recipe.parallel.ep, 1) * of_one
        else:
            scales += number * scales_of_codes(hidden, width, base)
    numbers = sum(stored_numbers(part, of_experts=of_experts) for of_experts in (False, True))
    return numbers + scales * BYTES_OF_SCALE


def numbers_bytes(recipe: Recipe) -> float:
    """The bytes of the largest weight whose numbers exist at a time, in compute's dtype."""
    if not recipe.model.adapter.has_codes:
        return 0.0
    rows = [row for row in modules_of(recipe.model, recipe.parallel) if not row.is_adapter and can_be_codes(row)]
    sizes = (row.own_parameters * (2 / 3 if row.part == "experts" else 1) for row in rows)  # gate and up
    return max(sizes, default=0) * BYTES_OF_DTYPE[recipe.precision.compute]
