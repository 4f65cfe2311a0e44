"""Rows over links between and within nodes: the formula equals a count over all choices of experts."""

from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest

from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.train import TrainConfig
from titan_moe.plan.check_report import describe
from titan_moe.plan.cost.links import chosen_probability, describe_links, rows_sent
from titan_moe.plan.cost.roofline import step_work

MOE = MoEConfig(num_experts=16, top_k=3, ffn_hidden_size=32)


def recipe(dispatcher: str, ep: int, of_node: int, top_k: int = 3) -> Recipe:
    return Recipe(
        model=ModelConfig(hidden_size=64, num_layers=2, moe=replace(MOE, top_k=top_k)),
        parallel=ParallelConfig(ep=ep, dispatcher=dispatcher, ep_ranks_per_node=of_node),
        train=TrainConfig(seq_len_tokens=128, micro_batch_sequences=2, global_batch_sequences=16),
    )


def count(dispatcher: str, ep: int, of_node: int, top_k: int) -> tuple[Fraction, Fraction]:
    """Rows of a token between nodes and within, over all choices of experts and all ranks of the token."""
    across, within, total = 0, 0, 0
    for chosen in combinations(range(MOE.num_experts), top_k):
        ranks = {expert * ep // MOE.num_experts for expert in chosen}
        for own in range(ep):
            total += 1
            targets = set(range(ep)) if dispatcher == "allgather" else ranks
            if dispatcher == "hierarchical":
                across += len({rank // of_node for rank in targets} - {own // of_node})
                within += sum(rank % of_node != own % of_node for rank in targets)
            else:
                across += sum(rank // of_node != own // of_node for rank in targets)
                within += sum(rank // of_node == own // of_node for rank in targets - {own})
    return Fraction(across, total), Fraction(within, total)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "hierarchical"])
@pytest.mark.parametrize(("ep", "of_node", "top_k"), [(4, 2, 3), (8, 4, 3), (8, 2, 3), (16, 4, 2), (8, 4, 1)])
def test_rows_of_links_equal_a_count_over_all_choices(dispatcher: str, ep: int, of_node: int, top_k: int) -> None:
    sent = rows_sent(recipe(dispatcher, ep, of_node, top_k), world_size=2 * ep)
    assert tuple(sent) == pytest.approx(tuple(map(float, count(dispatcher, ep, of_node, top_k))), rel=1e-12)
    assert sent.all == pytest.approx(sent.across + sent.within)


@pytest.mark.parametrize(("factor", "share"), [("auto", 1.0), (1.25, 1.25), (9.0, None), (0.0, None)])
def test_a_bound_sends_empty_rows_between_nodes(factor: float | str, share: float | None) -> None:
    run = recipe("hierarchical_symm_mem", 8, 2)
    sent = rows_sent(replace(run, parallel=replace(run.parallel, expert_rank_capacity_factor=factor)), 8)
    across, within = map(float, count("hierarchical", 8, 2, 3))
    assert sent == pytest.approx((3.0 if share is None else share * across, within))


def test_rows_of_one_node_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert rows_sent(recipe("alltoall", 8, 0), 16).across == 0 and describe_links(recipe("alltoall", 8, 0), 16) == ""
    assert rows_sent(recipe("local", 1, 0), 16).all == 0
    assert rows_sent(recipe("alltoall", 16, 0), 16).across > 0, "torchrun's nodes"


def test_check_reports_the_bytes_of_both_links() -> None:
    run = recipe("hierarchical", 8, 4)
    across, within = map(float, count("hierarchical", 8, 4, 3))
    once_a_rank = map(float, count("alltoall", 8, 4, 3))
    (line,) = [line for line in describe(run, 8).splitlines() if "between nodes" in line]
    mib = 2 * 256 * 64 * 2 / 2**20
    assert f"sent {across:.2f} times between nodes of 4 ranks and {within:.2f} times within" in line
    assert f"{across * mib:.1f} and {within * mib:.1f} MiB a rank" in line
    assert line.endswith("({!r}: {:.2f} and {:.2f} times)".format("alltoall", *once_a_rank).replace("'", '"'))


def test_etp_ranks_send_the_rows_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # four ranks of each of two ep groups
    run = recipe("hierarchical", 8, 0)
    split = replace(run, parallel=replace(run.parallel, etp=2))
    assert rows_sent(split, 16) == rows_sent(recipe("hierarchical", 8, 4), 16)
    across, within = map(float, count("hierarchical", 8, 4, 3))
    mib = 2 * 2 * 256 * 64 * 2 / 2**20
    assert f"{across * mib:.1f} and {within * mib:.1f} MiB a rank" in describe_links(split, 16)


def test_forwarded_rows_are_traffic() -> None:
    forwarding, plain = (
        recipe(dispatcher, 8, of_node) for dispatcher, of_node in (("hierarchical", 4), ("alltoall", 0))
    )
    wire = [step_work(run, 8)["dispatch"].wire_bytes for run in (forwarding, plain)]
    assert wire[0] / wire[1] == pytest.approx(
        float(sum(count("hierarchical", 8, 4, 3)) / sum(count("alltoall", 8, 4, 3)))
    )


@pytest.mark.parametrize("num_local", [2, 4, 8])
def test_groups_of_experts_limit_the_ranks_of_a_token(num_local: int) -> None:
    moe = replace(MOE, num_groups=4, top_k_groups=2)
    visits = Fraction(0)
    for groups in combinations(range(4), 2):
        experts = [expert for expert in range(16) if expert // 4 in groups]
        choices = list(combinations(experts, moe.top_k))
        visits += Fraction(sum(min(choice) < num_local for choice in choices), len(choices) * 6)
    assert chosen_probability(moe, num_local) == pytest.approx(float(visits))
    assert chosen_probability(moe, num_local) < chosen_probability(MOE, num_local)
