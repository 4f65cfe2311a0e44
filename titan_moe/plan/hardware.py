"""What a device can do at most, by the name that its driver reports: MFU divides by it, memory ends there.

Its architecture too: what is measured on one GPU is the best guess for its relatives.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device model, from its vendor's data sheet."""

    words: tuple[str, ...]
    """Words that a device's name must contain, in lower case."""
    bf16_flops: float
    """Peak dense bf16 FLOP/s, without sparsity."""
    memory_bytes_per_second: float
    """Peak bandwidth of its memory."""
    memory_gib: float
    """Memory that a process can allocate, rounded down."""
    link_bytes_per_second: float
    """Peak bandwidth of NVLink in one direction; what leaves the host is slower."""


# The first entry whose words all occur wins, so special forms stand before their family.
KNOWN_DEVICES = (
    Hardware(("h200", "nvl"), 835e12, 4.8e12, 139, 450e9),
    Hardware(("h200",), 989e12, 4.8e12, 139, 450e9),
    Hardware(("h100", "nvl"), 835e12, 3.9e12, 93, 300e9),
    Hardware(("h100", "pcie"), 756e12, 2.0e12, 79, 300e9),
    Hardware(("h100",), 989e12, 3.35e12, 79, 450e9),
    Hardware(("a100", "80gb"), 312e12, 2.0e12, 79, 300e9),
    Hardware(("a100",), 312e12, 1.55e12, 39, 300e9),
    Hardware(("b200",), 2250e12, 8.0e12, 178, 900e9),
)


Capability = tuple[int, int]
"""CUDA compute capability, major and minor: (9, 0) is sm_90."""

CAPABILITIES: dict[Capability, set[str]] = {
    (8, 0): {"a30", "a100", "a800"},
    (9, 0): {"h20", "h100", "h200", "h800", "gh200"},
    (10, 0): {"b100", "b200", "gb200"},
}
"""A word of these must occur in a device's name, in lower case."""


def find_hardware(device_name: str) -> Hardware | None:
    """Look up a device by its name (`NVIDIA H200`); None if it is unknown, and then there is no MFU to speak of."""
    words = _words(device_name)
    return next((known for known in KNOWN_DEVICES if words.issuperset(known.words)), None)


def find_capability(device_name: str) -> Capability | None:
    """Look up the compute capability of a device by its name; None if it is unknown."""
    words = _words(device_name)
    return next((capability for capability, names in CAPABILITIES.items() if words & names), None)


def _words(device_name: str) -> set[str]:
    return set(device_name.lower().replace("-", " ").split())
