"""Adapters as PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

A checkpoint's factors are written under the names of Hugging Face's modules, with a matrix for each expert. PEFT loads
these into transformers' models, whose experts are one tensor in memory, and so does vLLM. The form with
`target_parameters` has one matrix for all experts: A is [experts · r, inputs], and of B, [outputs, r · experts], column
j belongs to expert j mod experts. Gate and up have factors of their own, so beside their joined weight A has the ranks
of both, and B is block-diagonal.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_moe.checkpoint.hf_describe import without_form
from titan_moe.checkpoint.hf_export import refuse_existing, renamed_at_the_end
from titan_moe.checkpoint.hf_folder import HuggingFaceError, named
from titan_moe.checkpoint.hf_names.names import Piece, split_name
from titan_moe.config.adapter import AdapterKind, kind_of_linear
from titan_moe.config.model import ModelConfig
from titan_moe.parameters import Factors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
FUSED_NAMES = {"gate_up": "gate_up_proj", "down": "down_proj"}
"""Of transformers' parameters of all experts."""
PATTERNS = {"rank": "r", "alpha": "lora_alpha"}
"""What patterns of modules say -> the default."""

Both = tuple[Tensor, Tensor]
"""A and B of a weight."""
ReadFactor = Callable[[str], Tensor]
"""The whole of a factor, by its name here."""


def save_adapter(
    folder: Path,
    model: ModelConfig,
    factors: Mapping[str, Factors],
    own: Iterable[Piece],
    read: ReadFactor,
    *,
    base: str = "",
    is_fused: bool = False,
) -> None:
    """Write the adapter of a model; `own` are the tensors on disk of its base. With `is_fused` in the form of
    `target_parameters`.

    Raises: HuggingFaceError for a form that this family does not have, or a folder that is not empty.
    """
    from safetensors.torch import save_file

    refuse_existing(folder)
    by_ours: dict[str, list[Piece]] = {}
    for piece in own:
        if piece.ours in factors:
            by_ours.setdefault(piece.ours, []).append(piece)
    tensors: dict[str, Tensor] = {}
    for ours, cut in by_ours.items():
        a, b = (read(name) for name in (factors[ours].a, factors[ours].b))
        is_of_experts = b.ndim > 2
        if is_of_experts and (is_fused or cut[0].layout is not None):
            container = _container(folder, cut[0])
            name = f"{container}.base_layer" if ours.endswith("gate_up") else container
            both = [(name, fused_over_experts(a, b))]
        else:
            both = [(piece.name.removesuffix(".weight"), of_piece(piece, factors[ours], a, b)) for piece in cut]
        for name, (a_of_it, b_of_it) in both:
            tensors[f"{PREFIX}{name}.lora_A.weight"] = a_of_it.contiguous()
            tensors[f"{PREFIX}{name}.lora_B.weight"] = b_of_it.contiguous()
    with renamed_at_the_end(folder) as unfinished:
        save_file(tensors, unfinished / WEIGHTS_FILE, metadata={"format": "pt"})
        config = _config(model, factors, by_ours, base, is_fused=is_fused)
        (unfinished / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def of_piece(piece: Piece, factors: Factors, a: Tensor, b: Tensor) -> Both:
    """The factors of one tensor on disk: of an expert's matrix, or of some matrices of a fused weight."""
    if b.ndim > 2:
        return a[piece.box], b[piece.box]
    numbers = matrices_of(piece, factors)
    rows_a, rows_b = a.chunk(len(factors.rows)), b.split(factors.rows)
    return torch.cat([rows_a[i] for i in numbers]), torch.block_diag(*(rows_b[i] for i in numbers))


def matrices_of(piece: Piece, factors: Factors) -> list[int]:
    """The matrices of a fused weight that a tensor on disk has."""
    rows = piece.box[0] if piece.box else slice(0, sum(factors.rows))
    assert isinstance(rows, slice)
    starts = [sum(factors.rows[:i]) for i in range(len(factors.rows))]
    return [i for i, start in enumerate(starts) if rows.start <= start < rows.stop]


def fused_over_experts(a: Tensor, b: Tensor) -> Both:
    """A [e, M, r, I] and B [e, M, O, r] of M matrices, or without M -> [e · M·r, I] and [M·O, M·r · e], as PEFT's
    `target_parameters` has them."""
    if b.ndim > 3:
        b = torch.stack([torch.block_diag(*of_expert) for of_expert in b])
        a = a.flatten(1, 2)
    return a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)


def _container(folder: Path, piece: Piece) -> str:
    """The module of all experts in transformers.

    Raises: HuggingFaceError for a family whose parameters have other names or dimensions there.
    """
    match = re.fullmatch(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight", piece.name)
    if match is None:
        raise HuggingFaceError(folder, [without_form(piece.name)])
    return match[1]


def _kind(ours: str) -> AdapterKind:
    path = split_name(ours)[1].removesuffix(".weight")
    return kind_of_linear(path) or "experts"


def _config(
    model: ModelConfig, factors: Mapping[str, Factors], by_ours: Mapping[str, list[Piece]], base: str, *, is_fused: bool
) -> dict[str, Any]:
    """What `adapter_config.json` says. The rank of experts is the default: PEFT derives that of joined weights from
    it."""
    adapter = model.adapter
    first: AdapterKind = "experts" if adapter.has("experts") else _kind(next(iter(by_ours)))
    rank, scale = adapter.rank_of(first), adapter.scale_of(first)
    modules, ranks, alphas, parameters = set[str](), dict[str, int](), dict[str, float](), set[str]()
    for ours, cut in by_ours.items():
        kind = _kind(ours)
        if kind == "experts" and is_fused:
            name = FUSED_NAMES[ours.rpartition(".")[2]]
            parameters.add(f"experts.{name}")
            if name == "gate_up_proj":
                ranks[rf".*\.{name}"], alphas[rf".*\.{name}"] = 2 * rank, 2 * scale * rank
            continue
        for piece in cut:
            module = piece.name.removesuffix(".weight")
            last = module.rpartition(".")[2]
            modules.add(last)
            number = 1 if kind == "experts" else len(matrices_of(piece, factors[ours]))  # whose ranks are joined
            own = adapter.rank_of(kind) * number
            if (own, adapter.scale_of(kind)) != (rank, scale):
                pattern = re.sub(r"\.\d+\.", r"\\.\\d+\\.", re.sub(r"^model\.layers\.\d+\.", "", module))
                ranks[pattern], alphas[pattern] = own, own * adapter.scale_of(kind)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(scale * rank),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,  # the scale is in alpha
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "rank_pattern": ranks,
        "alpha_pattern": {name: _plain(value) for name, value in alphas.items()},
        "modules_to_save": None,
    }


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def refuse_unfit(folder: Path, found: Iterable[str], wanted: Iterable[str]) -> None:
    """Raises: HuggingFaceError that names what is missing and what is unknown."""
    have, want = set(found), set(wanted)
    problems = [f"missing: {named(sorted(want - have))}"] if want - have else []
    problems += [f"of no adapter of this model: {named(sorted(have - want))}"] if have - want else []
    if problems:
        raise HuggingFaceError(folder, problems)


def wanted(model: ModelConfig, own: Iterable[Piece]) -> dict[str, Piece]:
    """The modules on disk that an adapter of this model has factors of."""
    adapter = model.adapter
    names = {
        piece.name.removesuffix(".weight"): piece
        for piece in own
        if split_name(piece.ours)[1].endswith((".weight", "experts.gate_up", "experts.down"))
    }
    kinds = {name: _target(piece.ours) for name, piece in names.items()}
    return {name: piece for name, piece in names.items() if (kind := kinds[name]) and adapter.has(kind)}


def _target(ours: str) -> AdapterKind | None:
    path = split_name(ours)[1]
    return "experts" if path.startswith("feed_forward.experts.") else kind_of_linear(path.removesuffix(".weight"))


class AdapterFolder:
    """PEFT's files, of which a rank reads what it has.

    Raises: HuggingFaceError for files that cannot be read, or are not of the adapter of this model.
    """

    def __init__(self, folder: Path, model: ModelConfig, own: Iterable[Piece]) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder, self.model, self.pieces = folder, model, wanted(model, own)
        try:
            self.config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
            self.file = safe_open(folder / WEIGHTS_FILE, framework="pt")
        except (OSError, ValueError, SafetensorError) as error:
            raise HuggingFaceError(folder, [f"it has no adapter that can be read: {error}"]) from error
        numbers = [self.config.get(key) for key in PATTERNS.values()] if isinstance(self.config, dict) else []
        if not numbers or not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise HuggingFaceError(folder, [f"{CONFIG_FILE} does not say {' and '.join(PATTERNS.values())} as numbers"])
        ends = (".lora_A.weight", ".lora_B.weight")
        refuse_unfit(folder, self.file.keys(), [f"{PREFIX}{name}{end}" for name in self.pieces for end in ends])
        try:
            problems = list(self._other_scales())
        except (re.error, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise HuggingFaceError(folder, [f"a pattern of {CONFIG_FILE} cannot be read: {error}"]) from error
        if problems:
            raise HuggingFaceError(folder, problems[:1])

    def _other_scales(self) -> Iterator[str]:
        """How rank and alpha differ from those of the model."""
        for name, piece in self.pieces.items():
            kind = _kind(piece.ours)
            rank, alpha = (self._of_pattern(f"{key}_pattern", key_of, name) for key, key_of in PATTERNS.items())
            scale = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
            if not math.isclose(scale, self.model.adapter.scale_of(kind), rel_tol=1e-6):
                yield (
                    f"alpha = {alpha:g} and rank = {rank:g} of {name} give a scale of {scale:g}, and model.adapter one "
                    f"of {self.model.adapter.scale_of(kind):g}; set model.adapter.rank and alpha to those of the file"
                )

    def _of_pattern(self, patterns: str, key: str, name: str) -> float:
        """A number of a module: of the first pattern that its name ends with, or the default."""
        for pattern, number in (self.config.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return float(number)
        return float(self.config[key])

    def factors(self, factors: Mapping[str, Factors], shapes: Mapping[str, torch.Size]) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor of each factor of these weights. `shapes` are those of the factors."""
        by_ours: dict[str, dict[str, Piece]] = {}
        for name, piece in self.pieces.items():
            by_ours.setdefault(piece.ours, {})[name] = piece
        for ours, of_weight in factors.items():
            a, b = (torch.zeros(shapes[name], dtype=torch.float32) for name in (of_weight.a, of_weight.b))
            for name, piece in by_ours[ours].items():
                self._fill(name, piece, of_weight, a, b)
            yield from ((of_weight.a, a), (of_weight.b, b))

    def _fill(self, name: str, piece: Piece, factors: Factors, a: Tensor, b: Tensor) -> None:
        """Write the factors of one tensor on disk into those of ours."""
        read_a, read_b = (self.file.get_tensor(f"{PREFIX}{name}.lora_{end}.weight").float() for end in "AB")
        places = [(a[piece.box], b[piece.box])]
        if b.ndim < 3:
            rows_a, rows_b = a.chunk(len(factors.rows)), b.split(factors.rows)
            places = [(rows_a[i], rows_b[i]) for i in matrices_of(piece, factors)]
        parts = read_a.chunk(len(places)), read_b.split([len(into_b) for _, into_b in places])
        start = 0
        for (into_a, into_b), of_a, of_b in zip(places, *parts, strict=True):
            of_b = of_b[:, start : start + len(of_a)]  # block-diagonal
            if of_a.shape != into_a.shape or of_b.shape != into_b.shape:
                reason = f"{name} has factors {list(of_a.shape)} and {list(of_b.shape)}"
                raise HuggingFaceError(
                    self.folder, [f"{reason}, and the model {list(into_a.shape)} and {list(into_b.shape)}"]
                )
            into_a.copy_(of_a)
            into_b.copy_(of_b)
            start += len(of_a)
