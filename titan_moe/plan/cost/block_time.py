"""Times of the modules of a layer for one microbatch on one rank, by the table of modules. All in seconds."""

from collections.abc import Mapping

from titan_moe.config.adapter import kind_of_linear, num_matrices
from titan_moe.config.modules import Module, modules_of
from titan_moe.config.precision import BYTES_OF_DTYPE
from titan_moe.config.recipe import Recipe, microbatch_tokens
from titan_moe.config.recompute import recompute_of
from titan_moe.config.trainable import passes_of
from titan_moe.plan.choice.formats import IN_COMPUTE, choose_formats
from titan_moe.plan.cost.adapter_time import expert_adapter, linear_adapter, made_numbers
from titan_moe.plan.cost.codes import can_be_codes
from titan_moe.plan.cost.count import attention_core_flops_per_token
from titan_moe.plan.cost.gemm_time import (
    BLOCKWISE,
    CODES_OF_TORCH,
    EXPERTS_OF_TORCH,
    Passes,
    attention_passes,
    expert_passes,
    linear_seconds,
)
from titan_moe.plan.cost.loads import layer_loads
from titan_moe.plan.cost.messages import BARRIERS, EXPOSED, context_seconds, rows_seconds, tensor_seconds
from titan_moe.plan.cost.rates import Rates

MEASURED_CAPABILITY = (9, 0)
Times = Mapping[str, Passes]
"""By part: "attention", "linears", "experts", "adapters", "codes", "passes", "rows", "tp and cp", "recompute",
"head"."""
GEMMS = ("linears", "experts", "head", "recompute")
"""The parts that the limit of power slows down."""
NORM_FORWARD, NORM_BACKWARD = 3.3, 4.0
"""Passes of a norm over its width, with the sum into the residual stream (a recorded step of Qwen3)."""
ROTATED_FORWARD, ROTATED_BACKWARD = 2.0, 4.0
HIDDEN_FORWARD, HIDDEN_BACKWARD = 1.5, 3.0
"""Passes over the results of gate and up."""
LOGITS = 4.0
"""Passes over logits, in both directions."""


def formats_by_layer(recipe: Recipe) -> frozenset[tuple[str, int]]:
    """The modules, by path and layer, whose GEMMs have a format."""
    if not recipe.precision.formats:
        return frozenset()
    choices = choose_formats(recipe, MEASURED_CAPABILITY)
    return frozenset((it.module.path, it.module.layer) for it in choices if it.formats != IN_COMPUTE)


def layer_times(recipe: Recipe, world_size: int, rates: Rates, load: float) -> list[Times]:
    """The times of each layer; `load` is that of the busiest rank over the mean. Layers of one kind share them."""
    codes, again = formats_by_layer(recipe), recompute_of(recipe)
    passes = passes_of(recipe.model, recipe.optim.trainable)
    of_kind: dict[tuple[object, ...], Times] = {}
    times, modules = [], modules_of(recipe.model, recipe.parallel)
    for layer in range(recipe.model.num_blocks):
        rows = tuple(row for row in modules if row.is_in(layer))
        own_codes = frozenset(path for path, of_layer in codes if of_layer == layer)
        names = tuple(again.names_of(layer))
        own_passes = tuple(passes.get((row.path, layer), (1, 1.0)) for row in rows)
        pairs = recipe.model.attention.doubled_pairs(layer, recipe.train.seq_len_tokens)
        key = (tuple(row.path for row in rows), own_codes, names, own_passes, pairs)
        if key not in of_kind:
            block = _Block(recipe, world_size, rates, layer, rows, own_codes)
            of_kind[key] = block.times(own_passes, names, load)
        times.append(of_kind[key])
    return times


class _Block:
    def __init__(
        self, recipe: Recipe, world_size: int, rates: Rates, layer: int, rows: tuple[Module, ...], codes: frozenset[str]
    ) -> None:
        self.recipe, self.world_size, self.rates, self.layer = recipe, world_size, rates, layer
        self.rows, self.codes = rows, codes
        self.num_tokens = microbatch_tokens(recipe)
        self.element = BYTES_OF_DTYPE[recipe.precision.compute]

    def times(self, passes: tuple[tuple[bool | int, float], ...], names: tuple[str, ...], load: float) -> Times:
        """The times of the layer."""
        found: dict[str, Passes] = {}

        def add(part: str, more: Passes) -> None:
            found[part] = found.get(part, Passes()).plus(more)

        again = 0.0
        for row, (of_input, share) in zip(self.rows, passes, strict=True):
            for part, of_part in self._of_row(row, load, is_frozen=share == 0).items():
                add(part, Passes(of_part[0], of_part[1] * bool(of_input), of_part[2] * share))
                again += self._again(row, part, of_part, names)
        for part, seconds in self._messages().items():
            add(part, Passes(seconds, seconds))
            again += seconds if "block" in names else 0.0
        if again:
            add("recompute", Passes(0.0, again))
        return found

    def _of_row(self, row: Module, load: float, *, is_frozen: bool) -> Times:
        """The times of a module, by part."""
        if row.is_adapter:
            return {"adapters": self._adapter(row, load)}
        found: dict[str, Passes] = {}
        if is_frozen and self.recipe.model.adapter.has_codes and can_be_codes(row):
            found["codes"] = made_numbers(self.rates, row, self.element)
        if row.region == "experts":
            return found | {"experts": self._experts(row).times(load)}
        tp = max(self.recipe.parallel.tp, 1)
        if row.pair_width:
            flops = self.num_tokens * attention_core_flops_per_token(
                self.recipe.model, self.recipe.train.seq_len_tokens, [self.layer]
            ) / 3  # fmt: skip
            length = self.recipe.train.seq_len_tokens
            pairs = self.recipe.model.attention.doubled_pairs(self.layer, length)
            is_windowed = pairs < length * length
            core = attention_passes(self.rates, flops, length, is_windowed=is_windowed)
            measured = core.forward * self.recipe.model.attention.share_of_logits
            clips = self.recipe.optim.qk_clip.is_used  # backward then computes logits again
            found["attention"] = core.plus(Passes(0.0, measured * clips))
        elif row.multiply_adds:
            is_split = row.own_widths != row.widths and row.region != "router"
            tokens, widths = self.num_tokens * (tp if is_split else 1), row.own_widths
            if self.recipe.parallel.cp > 1 and is_split:  # heads that ulysses exchanges
                tokens = round(self.num_tokens * row.multiply_adds / max(widths[0] * widths[1], 1))
            one = linear_seconds(self.rates, tokens, widths, has_codes=row.path in self.codes) * self._blockwise(row)
            found["linears"] = Passes(one, one, one)
        if width := self._passed(row):
            forward, backward, elements = width
            seconds = self.num_tokens * elements * self.element / self.rates.memory
            found["passes"] = Passes(seconds * forward, seconds * backward)
        return found

    def _passed(self, row: Module) -> tuple[float, float, float] | None:
        """Passes of forward and backward over so many elements of a token."""
        width = self.recipe.model.hidden_size
        if row.region == "norms":
            return NORM_FORWARD, NORM_BACKWARD, width
        if row.region == "router" and row.multiply_adds:
            return 1.0, 3.0, width + 10 * row.widths[1]
        if row.path in ("attention.qkv", "attention.q_up", "attention.kv_up"):
            return ROTATED_FORWARD, ROTATED_BACKWARD, row.widths[1]
        if row.path.endswith("gate_up"):
            return HIDDEN_FORWARD, HIDDEN_BACKWARD, row.widths[1]
        return None

    def _experts(self, row: Module) -> Passes:
        """A layer's routed experts."""
        recipe, p = self.recipe, self.recipe.parallel
        loads, number = layer_loads(recipe), recipe.model.moe.num_experts // max(p.ep, 1)
        has_codes = row.path in self.codes
        passes = expert_passes(self.rates, loads.slots, loads.rows, number, row.own_widths, has_codes=has_codes)
        passes = passes.times(self._blockwise(row))
        if self.recipe.perf.fuses_experts and not (has_codes and recipe.model.moe.expert_mlp_bias):
            return passes
        return passes.times(CODES_OF_TORCH if has_codes else EXPERTS_OF_TORCH)

    def _blockwise(self, row: Module) -> float:
        """By how much longer a module takes in blocks than in rows."""
        if row.part is None or row.path not in self.codes:
            return 1.0
        return BLOCKWISE if self.recipe.precision.format_of(row.part) == "fp8_blockwise" else 1.0

    def _adapter(self, row: Module, load: float) -> Passes:
        """The low-rank factors beside a module."""
        base = next(it for it in self.rows if it.path == row.path.removesuffix(".adapter"))
        of_model, p = self.recipe.model.adapter, self.recipe.parallel
        if base.region == "experts":
            slots = layer_loads(self.recipe).slots * load
            return expert_adapter(self.rates, slots, base.own_widths, of_model.rank_of("experts"))
        tokens = self.num_tokens * (max(p.tp, 1) if base.own_widths != base.widths else 1)
        kind = kind_of_linear(base.path)
        assert kind is not None, "linear layers with adapters have a kind"
        sizes = tokens, base.own_widths, num_matrices(base.path), of_model.rank_of(kind)
        activates = kind != "attention" and base.path.endswith(".down")
        return linear_adapter(self.rates, *sizes, is_joined=not activates and base.path not in self.codes)

    def _messages(self) -> Mapping[str, float]:
        """What a layer's messages take of a forward, and again of its backward."""
        recipe, found = self.recipe, dict[str, float]()
        p = recipe.parallel
        others = tensor_seconds(recipe, self.world_size, self.rates, self.layer)
        if others := others + context_seconds(recipe, self.world_size, self.rates, self.layer):
            found["tp and cp"] = others
        if p.ep * p.etp > 1 and any(row.region == "experts" for row in self.rows):
            rows = 2 * rows_seconds(recipe, self.world_size, self.rates) * EXPOSED[p.overlap]
            found["rows"] = rows + (BARRIERS / 2 if p.ep > 1 else 0.0)
        return found

    def _again(self, row: Module, part: str, times: Passes, names: tuple[str, ...]) -> float:
        """What backward computes again of a module."""
        if not names:
            return 0.0
        if "block" in names:
            return times.forward
        if row.is_adapter and row.region != "experts":
            return 0.0
        if row.region == "experts":
            return 2 / 3 * times.forward if {"moe_act", "experts"} & set(names) else 0.0
        freed = row.freed_by([name for name in names if name != "attention"])
        if part == "attention":
            freed = row.freed_by(["attention"]) * ("attention" in names)
        if part == "codes":
            return times.forward if freed else 0.0
        if freed and part in ("linears", "attention") and not (row.path.endswith("qkv")):
            return times.forward
        return 2 * self.num_tokens * freed * self.element / self.rates.memory if freed else 0.0


def head_times(recipe: Recipe, rates: Rates, of_path: str = "head") -> Times:
    """The output head with its loss."""
    row = next((row for row in modules_of(recipe.model, recipe.parallel) if row.path == of_path), None)
    if row is None:
        return {}
    tp = max(recipe.parallel.tp, 1)
    num_tokens = microbatch_tokens(recipe) * tp
    depths = max(row.multiply_adds // max(row.widths[0] * row.widths[1], 1), 1)
    one = depths * linear_seconds(rates, num_tokens, row.own_widths, has_codes=False)
    logits = LOGITS * depths * num_tokens * row.own_widths[1] * BYTES_OF_DTYPE[recipe.precision.compute] / rates.memory
    share = passes_of(recipe.model, recipe.optim.trainable).get(("head", None), (1, 1.0))[1]
    return {"head": Passes(one + logits / 2, one + logits / 2, one * share)}
