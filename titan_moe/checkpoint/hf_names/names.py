"""How a tensor of ours is cut into the tensors of a Hugging Face checkpoint. No torch is needed."""

import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from titan_moe.config.model import ModelConfig

MXFP4_VALUES = 32
"""That share a scale, two in a byte."""
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
"""End the names of the two tensors on disk of one in MXFP4."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MOST_MTP_LAYERS = 16
"""Whose tensors are known by their names, where `[model]` has none."""

Shape = tuple[int, ...]
Box = tuple[int | slice, ...]


class Layout(NamedTuple):
    """How a tensor on disk has the dimensions of ours: in another order, and some as one."""

    order: tuple[int, ...]  # our dimensions, as they follow on disk
    parts: tuple[Shape, ...]  # of each dimension on disk, the sizes of ours that it consists of

    @property
    def shape(self) -> Shape:
        """The sizes on disk."""
        return tuple(prod(sizes) for sizes in self.parts)


class Piece(NamedTuple):
    """One tensor on disk, which is a box of one of ours."""

    name: str  # on disk
    ours: str
    box: Box  # in ours; dimensions that it does not name are whole
    shape: Shape  # on disk
    layout: Layout | None = None  # None: the dimensions of the box
    layout_in_mxfp4: Layout | None = None  # of the same in MXFP4, where a family has it
    is_copy: bool = False  # of one that is on disk under another name too

    @property
    def view(self) -> Shape:
        """The shape as which the tensor on disk has each dimension of ours alone, as slices of it are asked for."""
        return self.shape if self.layout is None else tuple(size for sizes in self.layout.parts for size in sizes)

    @property
    def in_mxfp4(self) -> "Piece | None":
        """The same as blocks of 32 values in 4 bits each; None where a family has none."""
        if self.layout_in_mxfp4 is None:
            return None
        *rows, width = self.layout_in_mxfp4.shape
        shape = (*rows, -(-width // MXFP4_VALUES), MXFP4_VALUES // 2)
        return self._replace(name=f"{self.name}{MXFP4_BLOCKS}", shape=shape, layout=self.layout_in_mxfp4)

    @property
    def scales(self) -> str | None:
        """The name on disk of the scales of one in MXFP4."""
        is_in_mxfp4 = self.layout_in_mxfp4 is not None and self.name.endswith(MXFP4_BLOCKS)
        return f"{self.name.removesuffix(MXFP4_BLOCKS)}{MXFP4_SCALES}" if is_in_mxfp4 else None


class Rows(NamedTuple):
    """Tensors on disk that lie one below the other in ours."""

    names: tuple[str, ...]
    sizes: Callable[[ModelConfig], tuple[int, ...]] | None = None
    """The rows of each; None means equal parts."""

    def cut(self, shape: Shape, config: ModelConfig) -> Iterator[tuple[str, Box, Shape]]:
        """Name, box and shape of each tensor on disk."""
        sizes = self.sizes(config) if self.sizes else (shape[0] // len(self.names),) * len(self.names)
        if sum(sizes) != shape[0]:
            raise ValueError(f"{', '.join(self.names)} have {sum(sizes)} rows in [model], and {shape[0]} in the model")
        begin = 0
        for name, size in zip(self.names, sizes, strict=True):
            yield name, (slice(begin, begin + size),), (size, *shape[1:])
            begin += size


class Experts(NamedTuple):
    """A tensor on disk for each expert, and for each of several matrices of it, such as gate and up."""

    names: tuple[str, ...]  # with {} for the number of the expert

    def cut(self, shape: Shape, config: ModelConfig) -> Iterator[tuple[str, Box, Shape]]:
        """Name, box and shape of each tensor on disk."""
        for expert in range(shape[0]):
            for i, name in enumerate(self.names):
                box = (expert, i) if len(self.names) > 1 else (expert,)
                yield name.format(expert), box, shape[len(box) :]


class Fused(NamedTuple):
    """One tensor on disk for all of ours, with the dimensions in another order, or several as one.

    Dimensions are letters. `Fused(name, "e2FL", ("e", "L", "F2"))` has gate and up interleaved in its last dimension:
    of two letters, the second is of neighbours. With `"2F"` gate comes first. `""` is a dimension of size one.
    """

    name: str
    ours: str
    on_disk: tuple[str, ...]
    in_mxfp4: tuple[str, ...] | None = None
    """The same of its form in MXFP4, whose blocks are along the last dimension."""

    def cut(self, shape: Shape, config: ModelConfig) -> Iterator[tuple[str, Box, Shape]]:
        """Name, box and shape of each tensor on disk."""
        yield self.name, (slice(0, shape[0]),), self.layout(shape, self.on_disk).shape

    def layout(self, shape: Shape, on_disk: tuple[str, ...]) -> Layout:
        """The dimensions on disk of a tensor of ours."""
        order = tuple(self.ours.index(dim) for dims in on_disk for dim in dims)
        return Layout(order, tuple(tuple(shape[self.ours.index(dim)] for dim in dims) for dims in on_disk))

    def layouts(self, shape: Shape) -> tuple[Layout, Layout | None]:
        """The dimensions on disk, and those in MXFP4."""
        return self.layout(shape, self.on_disk), self.layout(shape, self.in_mxfp4) if self.in_mxfp4 else None


class NotOnDisk(NamedTuple):
    """A tensor that the family lacks. It is zero here."""

    def cut(self, shape: Shape, config: ModelConfig) -> Iterator[tuple[str, Box, Shape]]:
        """Nothing."""
        yield from ()


Names = dict[str, Rows | Experts | Fused | NotOnDisk]
"""Name of a tensor in a block or outside of blocks -> its tensors on disk, also without the block."""


def one(name: str) -> Rows:
    """A tensor that is the same on disk."""
    return Rows((name,))


def pieces(names: Names, config: ModelConfig, shapes: Mapping[str, Shape]) -> Iterator[Piece]:
    """The tensors on disk of the tensors of a model.

    Raises: KeyError with the name of a tensor that the family has no name for.
    """
    for ours, shape in shapes.items():
        if ours == "head.weight" and config.embeddings_are_tied:
            continue  # the embedding's
        layer, local = split_name(ours)
        if local not in names:
            raise KeyError(ours)
        prefix, row = "" if layer is None else f"model.layers.{layer}.", names[local]
        layouts = row.layouts(shape) if isinstance(row, Fused) else ()
        for name, box, on_disk in row.cut(shape, config):
            yield Piece(f"{prefix}{name}", ours, box, on_disk, *layouts)
    ours_of = {EMBEDDING: "embed.weight", HEAD: "head.weight"}
    for copy, original in copies(config).items():
        if (ours := ours_of[original]) in shapes:
            yield Piece(copy, ours, (slice(0, shapes[ours][0]),), shapes[ours], is_copy=True)


def copies(config: ModelConfig) -> dict[str, str]:
    """The tensors on disk of blocks of multi-token prediction that are those of the model -> its names for them."""
    head = EMBEDDING if config.embeddings_are_tied else HEAD
    names: dict[str, str] = {}
    for layer in config.mtp_layers:
        prefix = f"model.layers.{layer}."
        names |= {f"{prefix}embed_tokens.weight": EMBEDDING, f"{prefix}shared_head.head.weight": head}
    return names


def prefixes_of_mtp(config: ModelConfig) -> tuple[str, ...]:
    """Begin the names on disk of multi-token prediction: blocks behind those of the model."""
    return tuple(f"model.layers.{config.num_layers + i}." for i in range(MOST_MTP_LAYERS))


def split_name(ours: str) -> tuple[int | None, str]:
    """The number of the block, if any, and the name in it."""
    match = re.fullmatch(r"layers\.(\d+)\.(.*)", ours)
    return (int(match[1]), match[2]) if match else (None, ours)


def _of_heads(config: ModelConfig) -> tuple[int, ...]:
    a = config.attention
    return a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, a.num_kv_heads * a.head_dim


def _of_normed_heads(config: ModelConfig) -> tuple[int, ...]:
    return _of_heads(config)[:2]


def mlp(ours: str, theirs: str) -> Names:
    """A dense MLP of three matrices."""
    return {
        f"{ours}.gate_up.weight": Rows((f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")),
        f"{ours}.down.weight": one(f"{theirs}.down_proj.weight"),
    }


NO_BIAS: Names = {"feed_forward.router.expert_bias_E": NotOnDisk()}


def routed(moe: str, gate: str, up: str, down: str) -> Names:
    """A router and its experts, whose matrices have these names."""
    return {
        "feed_forward.router.weight": one(f"{moe}.gate.weight"),
        **NO_BIAS,
        "feed_forward.experts.gate_up": Experts(
            (f"{moe}.experts.{{}}.{gate}.weight", f"{moe}.experts.{{}}.{up}.weight")
        ),
        "feed_forward.experts.down": Experts((f"{moe}.experts.{{}}.{down}.weight",)),
    }


COMMON: Names = {
    "embed.weight": one("model.embed_tokens.weight"),
    "norm.weight": one("model.norm.weight"),
    "head.weight": one("lm_head.weight"),
    "head.bias": one("lm_head.bias"),
    "attention_norm.weight": one("input_layernorm.weight"),
    "ffn_norm.weight": one("post_attention_layernorm.weight"),
    "attention.out.weight": one("self_attn.o_proj.weight"),
}
GQA: Names = {
    "attention.qkv.weight": Rows(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), _of_heads),
    "attention.qkv.bias": Rows(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), _of_heads),
    "attention.out.bias": one("self_attn.o_proj.bias"),
    "attention.sinks": one("self_attn.sinks"),
    "attention.qk_norm_rope.q_norm_weight": one("self_attn.q_norm.weight"),
    "attention.qk_norm_rope.k_norm_weight": one("self_attn.k_norm.weight"),
    "attention.qk_norm_rope.all_heads.weight": Rows(
        ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), _of_normed_heads
    ),
}
MLA: Names = {
    "attention.q_down.weight": one("self_attn.q_a_proj.weight"),
    "attention.q_norm.weight": one("self_attn.q_a_layernorm.weight"),
    "attention.q_up.weight": one("self_attn.q_b_proj.weight"),
    "attention.kv_down.weight": one("self_attn.kv_a_proj_with_mqa.weight"),
    "attention.kv_norm.weight": one("self_attn.kv_a_layernorm.weight"),
    "attention.kv_up.weight": one("self_attn.kv_b_proj.weight"),
}
MLA_WITHOUT_QUERY_LATENT: Names = MLA | {"attention.q_up.weight": one("self_attn.q_proj.weight")}
DENSE: Names = mlp("feed_forward", "mlp")
EXPERTS: Names = routed("mlp", "gate_proj", "up_proj", "down_proj")
SHARED: Names = mlp("feed_forward.shared_experts", "mlp.shared_experts")
MTP: Names = {
    "embedding_norm.weight": one("enorm.weight"),
    "hidden_norm.weight": one("hnorm.weight"),
    "eh_proj.weight": one("eh_proj.weight"),
    "final_norm.weight": one("shared_head.norm.weight"),
}
"""What a block of multi-token prediction has beside a block, in DeepSeek-V3 and GLM-4.5."""
ROUTER_BIAS: Names = {"feed_forward.router.expert_bias_E": one("mlp.gate.e_score_correction_bias")}
