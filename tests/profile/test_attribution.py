"""Attribution of host events: by the enclosing region, or by the forward operation of a backward node."""

from types import ModuleType
from typing import Any

from titan_moe.profile.attribution import HostEvent, attribute


def parts_of(events: list[dict[str, Any]]) -> dict[str, tuple[str, bool]]:
    """Name -> part and whether it is backward."""
    host = [
        HostEvent(e["name"], e["cat"], (e["pid"], e["tid"]), e["ts"], e["ts"] + e["dur"], e["args"]) for e in events
    ]
    return {event.name: (event.part, event.is_backward) for event, _ in attribute(host)}


def test_attribution_by_the_innermost_region(trace_events: ModuleType) -> None:
    found = parts_of(
        [
            trace_events.part("block", 0, 100),
            trace_events.part("attention", 10, 40),
            trace_events.event("cpu_op", "aten::mm", 20, 30),
            trace_events.event("cpu_op", "aten::add", 50, 60),
            trace_events.event("user_annotation", "FSDP::all_gather (layers.0)", 70, 90),
            trace_events.event("cpu_op", "c10d::_allgather_base_", 75, 80),
            trace_events.event("cpu_op", "aten::zeros", 110, 120),
        ]
    )
    assert found["aten::mm"] == ("attention", False)
    assert found["aten::add"] == ("block", False)
    assert found["c10d::_allgather_base_"] == ("sharding", False)
    assert found["aten::zeros"] == ("other", False)


def test_attribution_of_backward_by_the_operation_of_its_node(trace_events: ModuleType) -> None:
    found = parts_of(
        [
            trace_events.part("router", 0, 50),
            trace_events.forward("aten::linear", 10, 40, sequence=3),  # its nested t created node 3
            trace_events.forward("aten::t", 12, 14, sequence=3),
            trace_events.part("experts", 60, 100),
            trace_events.forward("CompiledFunction", 70, 90, sequence=4),
            trace_events.node("CompiledFunctionBackward", 200, 240, sequence=4),
            trace_events.event("cpu_op", "triton_fused", 210, 220, 2),
            trace_events.event(
                "cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 241, 249, 2
            ),
            trace_events.event("cpu_op", "aten::add_", 242, 244, 2),
            trace_events.node("TBackward0", 250, 260, sequence=3),
            trace_events.event("cpu_op", "aten::mul", 252, 254, 2),
        ]
    )
    assert found["triton_fused"] == ("experts", True)
    assert found["aten::add_"] == ("experts", True), (
        "AccumulateGrad runs right after the node that computed the gradient"
    )
    assert found["aten::mul"] == ("router", True)


def test_attribution_sequence_numbers_are_per_thread(trace_events: ModuleType) -> None:
    found = parts_of(
        [
            trace_events.part("router", 0, 100, thread=1),
            *(trace_events.forward(f"aten::a{number}", 10 * number, 10 * number + 5, number) for number in (1, 2, 3)),
            trace_events.part("head", 0, 100, thread=5),
            *(trace_events.forward(f"aten::b{number}", number, number + 1, number, thread=5) for number in (3, 40, 41)),
            trace_events.node("A3", 200, 210, sequence=3, forward_thread=1),
            trace_events.node("A2", 211, 219, sequence=2, forward_thread=1),
            trace_events.node("B41", 220, 230, sequence=41, forward_thread=2),
            trace_events.node("B40", 231, 239, sequence=40, forward_thread=2),
        ]
    )
    assert [found[f"autograd::engine::evaluate_function: {name}"][0] for name in ("A3", "A2", "B41", "B40")] == [
        "router",
        "router",
        "head",
        "head",
    ]


def test_attribution_of_recomputed_work_by_its_own_region(trace_events: ModuleType) -> None:
    found = parts_of(
        [
            trace_events.part("block", 0, 50),
            trace_events.forward("aten::add", 10, 20, sequence=1),
            trace_events.node("AddBackward0", 100, 200, sequence=1),
            trace_events.part("experts", 110, 150, thread=2),
            trace_events.forward("aten::mm", 120, 130, sequence=9, thread=2),
            trace_events.event("cpu_op", "aten::mul", 160, 170, 2),
        ]
    )
    assert found["aten::mm"] == ("experts", True)
    assert found["aten::mul"] == ("block", True)


def test_attribution_of_python_autograd_functions(trace_events: ModuleType) -> None:
    evaluation = "autograd::engine::evaluate_function: _MineBackward"
    found = parts_of(
        [
            trace_events.part("head", 0, 50),
            trace_events.forward("_Mine", 10, 20, sequence=1),
            trace_events.event("cpu_op", evaluation, 100, 200, 2),
            trace_events.event("cpu_op", "aten::copy_", 110, 120, 2),
            trace_events.event("cpu_op", "_MineBackward", 130, 190, 2, **{"Sequence number": 1, "Fwd thread id": 1}),
        ]
    )
    assert found[evaluation] == found["aten::copy_"] == ("head", True)


def test_communication_excludes_copies_beside_a_collective(trace_events: ModuleType) -> None:
    events = [
        trace_events.event("cpu_op", "titan_moe::all_to_all", 0, 100),
        trace_events.event("cpu_op", "aten::contiguous", 10, 20),
        trace_events.event("cpu_op", "c10d::alltoall_base_", 30, 50),
        trace_events.event("cpu_op", "aten::record_stream", 35, 40),
    ]
    host = [HostEvent(e["name"], e["cat"], (10, 1), e["ts"], e["ts"] + e["dur"], {}) for e in events]
    assert [event.is_communication for event, _ in attribute(host)] == [True, False, True, True]


def test_communication_is_start_and_wait_of_async_collectives(trace_events: ModuleType) -> None:
    events = [
        trace_events.event("cpu_op", "_c10d_functional::all_to_all_single", 0, 20),
        trace_events.event("cpu_op", "aten::empty", 5, 6),
        trace_events.event("cpu_op", "c10d::alltoall_base_", 10, 15),
        trace_events.event("cpu_op", "aten::mm", 30, 80),
        trace_events.event("cpu_op", "_c10d_functional::wait_tensor", 90, 100),
    ]
    host = [HostEvent(e["name"], e["cat"], (10, 1), e["ts"], e["ts"] + e["dur"], {}) for e in events]
    assert [event.is_communication for event, _ in attribute(host)] == [True, False, True, False, True]


def test_communication_includes_symmetric_memory_exchanges(trace_events: ModuleType) -> None:
    events = [
        trace_events.event("cpu_op", "titan_moe::symm_get", 0, 50),
        trace_events.event("cpu_op", "aten::copy_", 10, 20),
        trace_events.event("cpu_op", "titan_moe::expert_mlp", 60, 90),
    ]
    host = [
        HostEvent(e["name"], e["cat"], (e["pid"], e["tid"]), e["ts"], e["ts"] + e["dur"], e["args"]) for e in events
    ]
    assert [event.is_communication for event, _ in attribute(host)] == [True, True, False]
