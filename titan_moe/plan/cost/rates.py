"""What a GPU and its links reach: rates of kernels and messages, from which the time of a step is computed.

The defaults are those of a Hopper GPU of 989 TFLOP/s (tools/results/kernels.md and fp8.md). Tables in plan/tables/rates
have those of cards that were measured. A card without a table has rates in the proportions of its data sheet, and says
so. `titan-moe calibrate` writes a table of the same form (rates_file.py), which stands in for these.
"""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache

from titan_moe.plan.choice.hardware import Hardware, find_hardware
from titan_moe.plan.choice.kernel_table import TABLES

MEASURED_FLOPS = 989e12
"""Peak bf16 FLOP/s of the cards that were measured."""
SHARE_OF_MEMORY, SHARE_OF_LINK = 0.85, 0.73
"""Of data sheets, that measured cards reach."""


@dataclass(frozen=True)
class Rates:
    """Rates of a card, in FLOP/s or bytes a second, not yet slowed down by its limit of power."""

    is_measured: bool = True
    peak: float = MEASURED_FLOPS
    """bf16, of the data sheet, for MFU."""
    dense: float = 790e12
    """GEMMs in bf16, of wide matrices and many rows."""
    dense_codes: float = 1400e12
    """GEMMs in fp8."""
    grouped: float = 695e12
    """GEMMs of experts in bf16, with rows that they gather, of wide experts and many rows."""
    grouped_codes: float = 1180e12
    attention_forward: float = 630e12
    """Causal attention of long sequences, masked pairs not counted."""
    attention_backward: float = 418e12
    """The same, where backward counts as twice forward."""
    memory: float = 4.1e12
    link: float = 330e9
    node_link: float = 42e9
    """Between nodes, of a GPU with its own adapter of 400 Gbit/s."""
    node_link_is_measured: bool = False
    collective_rows: float = 120e9
    """Rows by collectives in a node, with the passes that sort them."""
    split_collectives: float = 180e9
    """Messages of tp and cp, one a module and no larger than its tokens."""

    def scaled(self, flops: float, memory: float, link: float) -> "Rates":
        """With other proportions."""
        of_gemms = ("peak", "dense", "dense_codes", "grouped", "grouped_codes")
        factors = dict.fromkeys((*of_gemms, "attention_forward", "attention_backward"), flops) | {"memory": memory}
        factors |= dict.fromkeys(("link", "collective_rows", "split_collectives"), link)
        return replace(self, is_measured=False, **{name: getattr(self, name) * by for name, by in factors.items()})


_OWN: ContextVar[tuple[Hardware, Rates] | None] = ContextVar("own rates", default=None)


@contextmanager
def own_rates(hardware: Hardware, rates: Rates) -> Iterator[None]:
    """Take these rates for those of a card."""
    token = _OWN.set((hardware, rates))
    try:
        yield
    finally:
        _OWN.reset(token)


def rates_of(device: str) -> Rates | None:
    """The rates of a device by its name; None for an unknown one."""
    own = _OWN.get()
    return own[1] if own and find_hardware(device) == own[0] else _shipped(device)


@lru_cache(maxsize=8)
def _shipped(device: str) -> Rates | None:
    if (hardware := find_hardware(device)) is None:
        return None
    for path in sorted((TABLES / "rates").glob("*.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if find_hardware(table["device"]) == hardware:
            return Rates(**table["rates"])
    return _of_data_sheet(hardware)


def _of_data_sheet(hardware: Hardware) -> Rates:
    basis = Rates()
    return basis.scaled(
        hardware.bf16_flops / basis.peak,
        SHARE_OF_MEMORY * hardware.memory_bytes_per_second / basis.memory,
        SHARE_OF_LINK * hardware.link_bytes_per_second / basis.link,
    )
