"""Tables of rates that `titan-moe calibrate` writes and `--rates` reads: what shapes took, and the rates that follow.

A rate is that of the formulas of gemm_time.py: a shape's time says what the rate of wide matrices and many rows is.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from titan_moe.config import RecipeError
from titan_moe.config.schema import in_toml
from titan_moe.plan.choice.hardware import find_hardware
from titan_moe.plan.cost.gemm_time import attention_passes, expert_passes, linear_seconds
from titan_moe.plan.cost.rates import Rates, own_rates, rates_of
from titan_moe.plan.cost.step_time import CODES

NAMES = tuple(field.name for field in fields(Rates) if field.type in ("float", float) and field.name != "peak")
"""Of rates that a table may have."""
BYTES = ("memory", "link", "node_link", "collective_rows", "split_collectives")
"""Those in bytes a second; the others are in FLOP/s."""


class Measurement(NamedTuple):
    """What one shape, or one message, took."""

    rate: str  # the field of Rates
    shape: Mapping[str, int]
    ms: float
    value: float
    """The rate that follows, in FLOP/s or bytes a second."""


def of_bytes(rate: str, shape: Mapping[str, int], ms: float, num_bytes: float) -> Measurement:
    """A pass over memory, or a message."""
    return Measurement(rate, shape, ms, num_bytes / (ms / 1e3))


def of_linear(rows: int, widths: tuple[int, int], ms: float, *, has_codes: bool) -> Measurement:
    """A GEMM of a linear layer, of codes without their quantisation."""
    at_one = linear_seconds(replace(Rates(), dense=1.0), rows, widths, has_codes=False)
    rate = "dense_codes" if has_codes else "dense"
    return Measurement(rate, {"rows": rows, "inputs": widths[0], "outputs": widths[1]}, ms, at_one / (ms / 1e3))


def of_experts(rows: int, slots: int, number: int, widths: tuple[int, int], ms: float, memory: float, *,
               has_codes: bool) -> Measurement:  # fmt: skip
    """Experts in forward and backward, of which passes over memory take their part at its rate; those of codes quantise
    their weights too.

    Raises: ValueError where these alone would take longer.
    """
    none, one = 1e30, 1.0  # FLOP/s
    of_passes = replace(Rates(), grouped=none, grouped_codes=none, memory=memory)
    passes = expert_passes(of_passes, slots, rows, number, widths, has_codes=has_codes).total
    passes += CODES * 3 * number * widths[0] * widths[1] / memory if has_codes else 0.0
    gemms = expert_passes(
        replace(of_passes, grouped=one, grouped_codes=one, memory=none),
        slots,
        rows,
        number,
        widths,
        has_codes=has_codes,
    )
    if (left := ms / 1e3 - passes) <= 0:
        raise ValueError(f"experts of {slots} slots took {ms:.3g} ms, less than their passes over memory")
    shape = {"rows": rows, "slots": slots, "experts": number, "width": widths[0], "hidden": widths[1]}
    return Measurement("grouped_codes" if has_codes else "grouped", shape, ms, gemms.total / left)


def of_attention(length: int, heads: int, width: int, forward_ms: float, both_ms: float) -> tuple[Measurement, ...]:
    """Causal attention of one sequence: forward, and backward alone."""
    flops = 2.0 * heads * length * length * width  # two products, half of whose pairs are masked
    at_one = attention_passes(
        replace(Rates(), attention_forward=1.0, attention_backward=1.0), flops, length, is_windowed=False
    )
    shape = {"length": length, "heads": heads, "width": width}
    backward_ms = both_ms - forward_ms
    return (
        Measurement("attention_forward", shape, forward_ms, at_one.forward / (forward_ms / 1e3)),
        Measurement("attention_backward", shape, backward_ms, at_one.backward_input / (backward_ms / 1e3)),
    )


def written(device: str, measured: Sequence[Measurement], heading: str) -> str:
    """A table: the median rate of each kind, and what each shape took."""
    values = {name: [it.value for it in measured if it.rate == name] for name in NAMES}
    lines = [*(f"# {line}" for line in heading.splitlines()), f"device = {in_toml(device)}", "[rates]"]
    lines += [f"{name} = {median(found):.4g}" for name, found in values.items() if found]
    for it in measured:
        shape = ", ".join(f"{name} = {size}" for name, size in it.shape.items())
        lines += ["", "[[measured]]", f"rate = {in_toml(it.rate)}", f"shape = {{ {shape} }}"]
        lines += [f"ms = {it.ms:.4f}", f"value = {it.value:.4g}"]
    return "\n".join(lines) + "\n"


def read_rates(path: str | Path) -> tuple[str, Rates]:
    """A table's device, and its rates; those that it lacks are the shipped ones of the device, or of its data sheet.

    Raises: RecipeError for a file that is no such table.
    """
    try:
        table: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # of the file, its text or its TOML
        raise RecipeError([f"--rates {path} cannot be read: {error}"]) from error
    device, found = table.get("device"), table.get("rates")
    if not isinstance(device, str) or not isinstance(found, dict):
        raise RecipeError([f"--rates {path} lacks device or [rates], which titan-moe calibrate writes"])
    unknown = [f"rates.{name}" for name in found if name not in NAMES]
    problems = [f"--rates {path} has unknown {', '.join(unknown)}; the rates are {', '.join(NAMES)}"] if unknown else []
    problems += [
        f"--rates {path}: rates.{name} = {value} is no rate above 0"
        for name, value in found.items()
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0
    ]
    if problems:
        raise RecipeError(problems)
    if (basis := rates_of(device)) is None:
        raise RecipeError(
            [f"--rates {path} is of {device}, whose peak is not known; add it to plan/choice/hardware.py"]
        )
    has_kernels = {"dense", "grouped", "memory"} <= found.keys()
    given = {name: float(value) for name, value in found.items()}
    measured = {"is_measured": basis.is_measured or has_kernels, "node_link_is_measured": "node_link" in found}
    return device, replace(basis, **given, **measured)  # type: ignore[arg-type]


@contextmanager
def rates_from(path: str | None) -> Iterator[str | None]:
    """Take the rates of a file for those of its device, whose name is yielded; nothing without a file."""
    if path is None:
        yield None
        return
    device, rates = read_rates(path)
    hardware = find_hardware(device)
    assert hardware is not None, "rates are of a known device"
    with own_rates(hardware, rates):
        yield device
