"""Events find their part: around them, or in the forward that they undo."""

from types import ModuleType
from typing import Any

from titan_moe.profile.attribution import HostEvent, attribute


def parts_of(events: list[dict[str, Any]]) -> dict[str, tuple[str, bool]]:
    """Name -> part and whether it is backward."""
    host = [
        HostEvent(e["name"], e["cat"], (e["pid"], e["tid"]), e["ts"], e["ts"] + e["dur"], e["args"]) for e in events
    ]
    return {event.name: (event.part, event.is_backward) for event, _ in attribute(host)}


def test_the_innermost_region_counts(by_hand: ModuleType) -> None:
    found = parts_of(
        [
            by_hand.part("block", 0, 100),
            by_hand.part("attention", 10, 40),
            by_hand.event("cpu_op", "aten::mm", 20, 30),
            by_hand.event("cpu_op", "aten::add", 50, 60),
            by_hand.event("user_annotation", "FSDP::all_gather (layers.0)", 70, 90),
            by_hand.event("cpu_op", "c10d::_allgather_base_", 75, 80),
            by_hand.event("cpu_op", "aten::zeros", 110, 120),
        ]
    )
    assert found["aten::mm"] == ("attention", False)
    assert found["aten::add"] == ("block", False)
    assert found["c10d::_allgather_base_"] == ("sharding", False)
    assert found["aten::zeros"] == ("other", False)


def test_backward_belongs_to_the_operation_that_made_its_node(by_hand: ModuleType) -> None:
    found = parts_of(
        [
            by_hand.part("router", 0, 50),
            by_hand.forward("aten::linear", 10, 40, sequence=3),  # only begins under 3; its inner t made the node
            by_hand.forward("aten::t", 12, 14, sequence=3),
            by_hand.part("experts", 60, 100),
            by_hand.forward("CompiledFunction", 70, 90, sequence=4),
            by_hand.node("CompiledFunctionBackward", 200, 240, sequence=4),
            by_hand.event("cpu_op", "triton_fused", 210, 220, 2),
            by_hand.event(
                "cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 241, 249, 2
            ),
            by_hand.event("cpu_op", "aten::add_", 242, 244, 2),
            by_hand.node("TBackward0", 250, 260, sequence=3),
            by_hand.event("cpu_op", "aten::mul", 252, 254, 2),
        ]
    )
    assert found["triton_fused"] == ("experts", True)
    assert found["aten::add_"] == ("experts", True), "a gradient is stored right after the node that made it"
    assert found["aten::mul"] == ("router", True)


def test_sequence_numbers_are_counted_by_thread(by_hand: ModuleType) -> None:
    found = parts_of(
        [
            by_hand.part("router", 0, 100, thread=1),
            *(by_hand.forward(f"aten::a{number}", 10 * number, 10 * number + 5, number) for number in (1, 2, 3)),
            by_hand.part("head", 0, 100, thread=5),
            *(by_hand.forward(f"aten::b{number}", number, number + 1, number, thread=5) for number in (3, 40, 41)),
            by_hand.node("A3", 200, 210, sequence=3, forward_thread=1),
            by_hand.node("A2", 211, 219, sequence=2, forward_thread=1),
            by_hand.node("B41", 220, 230, sequence=41, forward_thread=2),
            by_hand.node("B40", 231, 239, sequence=40, forward_thread=2),
        ]
    )
    assert [found[f"autograd::engine::evaluate_function: {name}"][0] for name in ("A3", "A2", "B41", "B40")] == [
        "router",
        "router",
        "head",
        "head",
    ]


def test_what_is_recomputed_keeps_its_own_name(by_hand: ModuleType) -> None:
    found = parts_of(
        [
            by_hand.part("block", 0, 50),
            by_hand.forward("aten::add", 10, 20, sequence=1),
            by_hand.node("AddBackward0", 100, 200, sequence=1),
            by_hand.part("experts", 110, 150, thread=2),
            by_hand.forward("aten::mm", 120, 130, sequence=9, thread=2),
            by_hand.event("cpu_op", "aten::mul", 160, 170, 2),
        ]
    )
    assert found["aten::mm"] == ("experts", True)
    assert found["aten::mul"] == ("block", True)


def test_a_node_may_carry_the_number_that_its_evaluation_lacks(by_hand: ModuleType) -> None:
    evaluation = "autograd::engine::evaluate_function: _MineBackward"
    found = parts_of(
        [
            by_hand.part("head", 0, 50),
            by_hand.forward("_Mine", 10, 20, sequence=1),
            by_hand.event("cpu_op", evaluation, 100, 200, 2),
            by_hand.event("cpu_op", "aten::copy_", 110, 120, 2),
            by_hand.event("cpu_op", "_MineBackward", 130, 190, 2, **{"Sequence number": 1, "Fwd thread id": 1}),
        ]
    )
    assert found[evaluation] == found["aten::copy_"] == ("head", True)


def test_copies_beside_a_message_are_none(by_hand: ModuleType) -> None:
    events = [
        by_hand.event("cpu_op", "titan_moe::all_to_all", 0, 100),
        by_hand.event("cpu_op", "aten::contiguous", 10, 20),
        by_hand.event("cpu_op", "c10d::alltoall_base_", 30, 50),
        by_hand.event("cpu_op", "aten::record_stream", 35, 40),
    ]
    host = [HostEvent(e["name"], e["cat"], (10, 1), e["ts"], e["ts"] + e["dur"], {}) for e in events]
    assert [event.is_communication for event, _ in attribute(host)] == [True, False, True, True]


def test_the_two_halves_of_a_message_are_communication_and_what_lies_between_is_not(by_hand: ModuleType) -> None:
    events = [
        by_hand.event("cpu_op", "_c10d_functional::all_to_all_single", 0, 20),
        by_hand.event("cpu_op", "aten::empty", 5, 6),
        by_hand.event("cpu_op", "c10d::alltoall_base_", 10, 15),
        by_hand.event("cpu_op", "aten::mm", 30, 80),
        by_hand.event("cpu_op", "_c10d_functional::wait_tensor", 90, 100),
    ]
    host = [HostEvent(e["name"], e["cat"], (10, 1), e["ts"], e["ts"] + e["dur"], {}) for e in events]
    assert [event.is_communication for event, _ in attribute(host)] == [True, False, True, False, True]


def test_an_exchange_over_shared_memory_is_communication_throughout(by_hand: ModuleType) -> None:
    events = [
        by_hand.event("cpu_op", "titan_moe::symm_get", 0, 50),
        by_hand.event("cpu_op", "aten::copy_", 10, 20),
        by_hand.event("cpu_op", "titan_moe::expert_mlp", 60, 90),
    ]
    host = [
        HostEvent(e["name"], e["cat"], (e["pid"], e["tid"]), e["ts"], e["ts"] + e["dur"], e["args"]) for e in events
    ]
    assert [event.is_communication for event, _ in attribute(host)] == [True, True, False]
