"""All Triton kernels in Triton's interpreter, on CPU."""

from typing import Any

from titan_moe.kernels.registry import KERNELS, load_all


def test_triton_kernels_in_the_interpreter(interpreter: Any) -> None:
    """All tests that are marked so pass, none is skipped, and each kernel of the registry has some among them."""
    load_all()
    ends = [beside.finish() for beside in interpreter]
    log = "\n".join(log for _, log in ends)
    passed = [line for line in log.splitlines() if " PASSED" in line]
    num_moved = sum(beside.num_moved for beside in interpreter)
    silent = [k.name for k in KERNELS.values() if k.needs_triton and not any(f"[{k.name}-" in line for line in passed)]
    has_all = not any(code for code, _ in ends) and not silent and len(passed) >= num_moved
    assert has_all and " SKIPPED" not in log, f"{silent} did not run, {len(passed)} of {num_moved} passed\n{log}"
