"""Compile Triton kernels for an H200 on a machine without a GPU."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from titan_moe.kernels.experts.fp8 import block_mm, block_weight_grad
from titan_moe.versions import installed_release

SHARED_MEMORY_BYTES = 227 * 1024
SPILLED_BYTES = {"_block_weight_grad_kernel": 64, "_block_mm_kernel": 8}
"""Of a thread, where a few registers are missing for its sums, products and scales; 0 elsewhere."""
if installed_release("triton") >= (3, 9):
    SPILLED_BYTES |= {"_block_weight_grad_kernel": 72, "_block_mm_kernel": 40, "_list_kernel": 16}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Compiled(NamedTuple):
    """The binary of a launch."""

    name: str
    shared_bytes: int
    spilled_bytes: int
    num_matrix_ops: int
    num_wide_stores: int
    """Global stores of 16 bytes a thread."""
    num_wide_loads: int
    """Global loads of 16 bytes a thread, into registers or shared memory."""
    key: str
    """Hash of the code: equal for launches of the same binary."""

    @property
    def fits(self) -> bool:
        """Whether it fits the registers and shared memory of an H200."""
        return self.shared_bytes <= SHARED_MEMORY_BYTES and self.spilled_bytes <= SPILLED_BYTES.get(self.name, 0)


INSPECTED: dict[str, Compiled] = {}
"""By hash of the code: many launches are of one binary, and each look at it is a process."""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Compiled]]:
    """Make launches compile for sm_90 without running; yields the binaries. Arguments may be meta tensors."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton's compiler, and TRITON_INTERPRET is set")
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        binary = run(kernel, *args, grid=grid, warmup=True, **options)
        if binary.hash not in INSPECTED:
            INSPECTED[binary.hash] = _inspect(binary, tmp_path / "kernel.cubin")
        compiled.append(INSPECTED[binary.hash])
        return binary

    target = GPUTarget("cuda", 90, 32)
    fake_driver = SimpleNamespace(
        get_current_device=lambda: "hopper", get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    for module in (block_mm, block_weight_grad):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", fake_driver)
    yield compiled


def _inspect(binary: Any, path: Path) -> Compiled:
    path.write_bytes(binary.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], capture_output=True, text=True, check=True)
    spilled = sum(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", usage.stdout))
    patterns = (
        r"wgmma\.mma_async",
        r"st\.global\.v4\.b32",
        r"ld\.global(\.\w+)*\.v4\.b32|cp\.async\.cg\.shared\.global",
    )
    counts = [len(re.findall(pattern, binary.asm["ptx"])) for pattern in patterns]
    return Compiled(binary.metadata.name, binary.metadata.shared, spilled, *counts, binary.hash)
