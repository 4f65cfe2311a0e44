"""Peak rates and memory of devices, by the name that the driver reports."""

from dataclasses import dataclass
from pathlib import Path

USABLE_SHARE, OUTSIDE_GIB = 0.97, 1.9
"""Of a GPU's memory: what a capacity that follows the load leaves for fragmentation (training/capacity_control.py), and
what the CUDA context, NCCL and other libraries allocate beside PyTorch."""


Capability = tuple[int, int]
"""CUDA compute capability, major and minor: (9, 0) is sm_90."""


@dataclass(frozen=True)
class Hardware:
    """One device model, from its vendor's data sheet."""

    words: tuple[str, ...]  # that a device's name must contain, in lower case
    bf16_flops: float  # peak dense FLOP/s, without sparsity
    memory_bytes_per_second: float  # peak bandwidth of its memory
    memory_gib: float  # that a process can allocate, rounded down
    host_bytes_per_second: float
    """Of copies to or from pinned memory, in one direction, while other GPUs of the host copy too. Measured on H100s,
    where both directions at once take as long as one after the other; else by the generation of PCIe."""
    link_bytes_per_second: float  # peak bandwidth of NVLink in one direction; between nodes it is slower
    capability: Capability = (9, 0)

    def free_gib(self, ranks_per_gpu: int = 1) -> float:
        """What the peak of a rank may be: the memory that the CUDA context, NCCL and a reserve leave. All that asks
        whether a step fits asks this."""
        return (self.memory_gib * USABLE_SHARE - OUTSIDE_GIB) / ranks_per_gpu

    def room(self, device: str = "", ranks_per_gpu: int = 1) -> str:
        """The same in words."""
        free, memory = self.free_gib(ranks_per_gpu), self.memory_gib / ranks_per_gpu
        place = f" on {device}" if device else ""
        return f"the {free:.3g} GiB that are free of {memory:.4g}{place} (context, NCCL and a reserve have the rest)"


# The first entry whose words all occur is taken, so variants stand before their family.
KNOWN_DEVICES = (
    Hardware(("h200", "nvl"), 835e12, 4.8e12, 139, 31e9, 450e9),
    Hardware(("h200",), 989e12, 4.8e12, 139, 31e9, 450e9),
    Hardware(("h100", "nvl"), 835e12, 3.9e12, 93, 31e9, 300e9),
    Hardware(("h100", "pcie"), 756e12, 2.0e12, 79, 31e9, 300e9),
    Hardware(("h100",), 989e12, 3.35e12, 79, 31e9, 450e9),
    Hardware(("a100", "80gb"), 312e12, 2.0e12, 79, 16e9, 300e9, (8, 0)),
    Hardware(("a100",), 312e12, 1.55e12, 39, 16e9, 300e9, (8, 0)),
    Hardware(("b200",), 2250e12, 8.0e12, 178, 31e9, 900e9, (10, 0)),
)


def find_hardware(device_name: str) -> Hardware | None:
    """Look up a device by its name (`NVIDIA H200`); None if it is unknown: then there is no MFU."""
    words = _words(device_name)
    return next((known for known in KNOWN_DEVICES if words.issuperset(known.words)), None)


def dotted(capability: Capability) -> str:
    """`9.0`."""
    return ".".join(map(str, capability))


def gpus_here(driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """The kinds of GPUs of this machine, by the names that NVIDIA's driver on Linux reports; none elsewhere."""
    lines = [line for file in driver.glob("*/information") for line in file.read_text("utf-8").splitlines()]
    return sorted({line.partition(":")[2].strip() for line in lines if line.startswith("Model:")})


def _words(device_name: str) -> set[str]:
    return set(device_name.lower().replace("-", " ").split())
