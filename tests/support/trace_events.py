"""A hand-written trace: events in the format of the profiler."""

from typing import Any

from titan_moe.profile.region import ACTION_PREFIX, MESSAGES, PREFIX

Event = dict[str, Any]


def event(category: str, name: str, start_us: float, stop_us: float, thread: int = 1, **args: Any) -> Event:
    """An event of a thread (or stream) with its arguments."""
    times = {"ts": start_us, "dur": stop_us - start_us}
    return {"ph": "X", "cat": category, "name": name, "pid": 10, "tid": thread, **times, "args": args}


def part(name: str, start_us: float, stop_us: float, thread: int = 1) -> Event:
    """A region."""
    return event("user_annotation", PREFIX + name, start_us, stop_us, thread)


def action(kind: str, stage: int, microbatch: int, start_us: float, stop_us: float, beside: str = "") -> Event:
    """An action of a pipeline rank, perhaps in a pair."""
    return event("user_annotation", f"{ACTION_PREFIX}{kind} {stage} {microbatch}{beside}", start_us, stop_us)


def message(start_us: float, stop_us: float) -> Event:
    """A message between stages, or the wait for one inside an action."""
    return part(MESSAGES, start_us, stop_us)


def forward(name: str, start_us: float, stop_us: float, sequence: int, thread: int = 1) -> Event:
    """A forward operation with a backward node."""
    numbers = {"Sequence number": sequence, "Fwd thread id": 0}
    return event("cpu_op", name, start_us, stop_us, thread, **numbers)


def node(name: str, start_us: float, stop_us: float, sequence: int, forward_thread: int = 1, thread: int = 2) -> Event:
    """The evaluation of a backward node."""
    numbers = {"Sequence number": sequence, "Fwd thread id": forward_thread}
    return event("cpu_op", f"autograd::engine::evaluate_function: {name}", start_us, stop_us, thread, **numbers)


def launch(correlation: int, start_us: float, stop_us: float, thread: int = 1) -> Event:
    """The host's call that launches a kernel."""
    return event("cuda_runtime", "cudaLaunchKernel", start_us, stop_us, thread, correlation=correlation)


def kernel(correlation: int, name: str, start_us: float, stop_us: float, stream: int = 7) -> Event:
    """A kernel on a stream of the GPU."""
    return event("kernel", name, start_us, stop_us, stream, correlation=correlation)


STEP_ON_GPU = [
    event("user_annotation", "ProfilerStep#4", 0, 1000),
    part("attention", 10, 110),
    forward("aten::mm", 20, 60, sequence=5),
    launch(1, 30, 40),
    part("dispatch", 120, 200),
    event("cpu_op", "c10d::alltoall_base_", 130, 190),
    launch(2, 140, 150),
    part("experts", 210, 300),
    event("cpu_op", "aten::_grouped_mm", 220, 290),
    launch(3, 230, 240),
    node("MmBackward0", 400, 500, sequence=5),
    launch(4, 410, 420, thread=2),
    part("optimizer", 600, 700),
    launch(5, 650, 660),
    kernel(1, "gemm", 50, 150),
    kernel(2, "ncclDevKernel_SendRecv", 160, 400, stream=9),
    kernel(3, "gemm", 300, 500),
    kernel(4, "gemm", 510, 610),
    kernel(5, "adamw", 680, 880),
    event("gpu_memcpy", "Memcpy DtoD", 700, 750, 8, correlation=99),
    event("gpu_user_annotation", PREFIX + "attention", 50, 900, 7),
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 10, "tid": 1, "ts": 30},
]
"""One step of 1000 us: gaps of 50, 10, 10, 70 and 120 us, communication of 240 us, 100 of it hidden by experts."""


def replay(correlation: int, start_us: float, stop_us: float) -> Event:
    """The host's call that launches a CUDA graph."""
    return event("cuda_runtime", "cudaGraphLaunch", start_us, stop_us, correlation=correlation)


REPLAYED_STEPS = [
    event("user_annotation", "ProfilerStep#3", 0, 1000),  # launched
    part("attention", 10, 110),
    forward("aten::mm", 20, 60, sequence=5),
    launch(1, 30, 40),
    part("experts", 210, 300),
    launch(2, 230, 240),
    node("MmBackward0", 400, 500, sequence=5),
    launch(3, 410, 420, thread=2),
    kernel(1, "gemm", 50, 150),
    kernel(2, "gemm", 300, 500),
    kernel(3, "gemm", 510, 610),
    event("user_annotation", "ProfilerStep#4", 1000, 1900),  # recorded, then replayed
    event("cuda_runtime", "cudaGraphInstantiateWithFlags", 1700, 1790, correlation=90),
    replay(4, 1800, 1810),
    kernel(4, "gemm", 1820, 1900),
    event("user_annotation", "ProfilerStep#5", 2000, 2300),
    replay(5, 2010, 2020),
    kernel(5, "gemm", 2200, 2240),
    kernel(5, "gemm", 2030, 2060),
    kernel(5, "gemm", 2100, 2200),
    kernel(5, "unknown", 2250, 2290),
]
"""Three steps. The last one is a replay of 300 us with gaps of 30, 40, 10 and 10 us."""
