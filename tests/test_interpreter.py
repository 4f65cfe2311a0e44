"""All Triton kernels in Triton's interpreter, on CPU."""

from typing import Any

from titan_moe.kernels.registry import KERNELS, load_all


def test_triton_kernels_in_the_interpreter(interpreter: Any) -> None:
    """All tests that are marked so pass, none is skipped, and each kernel of the registry has some among them."""
    load_all()
    code, log = interpreter.finish()
    passed = [line for line in log.splitlines() if " PASSED" in line]
    silent = [k.name for k in KERNELS.values() if k.needs_triton and not any(f"[{k.name}-" in line for line in passed)]
    assert code == 0 and not silent and " SKIPPED" not in log, f"{silent} did not run\n{log}"
