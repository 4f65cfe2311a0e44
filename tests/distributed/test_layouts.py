"""Every layout that the rules accept trains as one process does: all pairs of axes, together or (with --all-cases) each
alone, some foldings of 8 ranks, and random samples of the space.

    python -m pytest tests/distributed/test_layouts.py --layouts 200

Layouts are drawn here and accepted by the rules, so an axis or a dispatcher that begins to work is tested without
another line. Expert counts, gradients, their norms and losses are compared as in test_one_loss.py, in fp64: over 20
steps where `--layouts` is given, else over few, and for every seventh pair beyond the warm-up.

What a pipeline runs (schedule, stages a rank, layers a stage) is drawn after all else, from a generator of its own. So
a seed means what it meant before that was drawn, and where pp > 1 it then was "1f1b" with layers by FLOPs.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any, Literal

import pytest
from support import load

from titan_moe.config import Recipe, check_rules
from titan_moe.config.dispatchers import DISPATCHERS
from titan_moe.config.parallel import ParallelConfig, ParallelSizes, resolve
from titan_moe.config.perf import MemoryConfig
from titan_moe.config.pipeline_schedules import SCHEDULES
from titan_moe.config.recompute import AUTO, NONE, RECOMPUTABLE
from titan_moe.config.train import DataConfig, RunConfig

one_loss = load("distributed/test_one_loss")

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "edp", "ep", "etp")
WORLDS = (2, 4, 8)
MODELS = list(one_loss.SPLIT_MODELS)
KINDS: tuple[Literal["ulysses", "allgather", "ring"], ...] = ("ulysses", "allgather", "ring")
STEPS, SOME, FEW = one_loss.STEPS, one_loss.SOME, one_loss.FEW
SAMPLES = 1
"""Without `--layouts`."""
TRIES = 20
"""Layouts of stages that are drawn before a schedule counts as refused."""
STARVED = {"every_expert": -1, "an_expert_idle": 1, "half_the_experts_idle": 4}


def recipe_of(parallel: ParallelConfig, model: str, micro_batch_sequences: int, memory: tuple[str, ...] = ()) -> Recipe:
    """Documents of uneven length, but for ring attention; balancing losses, a dense layer and shared experts are in the
    model."""
    base = one_loss.split_recipe(parallel, model, memory=MemoryConfig(memory), run=RunConfig(device="cpu"))
    train = replace(base.train, micro_batch_sequences=micro_batch_sequences)
    return replace(base, train=train, data=DataConfig(document_attention=has_documents(parallel)))


def in_two(parallel: ParallelConfig, model: str, num_ranks: int) -> Recipe:
    """`recipe_of` with two microbatches, unless there are no more sequences."""
    return recipe_of(parallel, model, max(one_loss.SEQUENCES // resolve(parallel, num_ranks).dp // 2, 1))


def has_documents(parallel: ParallelConfig) -> bool:
    return parallel.cp == 1 or parallel.cp_kind != "ring"


def sizes_of(parallel: ParallelConfig, num_ranks: int) -> ParallelSizes | None:
    """The sizes of all axes; None if they do not fill the ranks."""
    try:
        return resolve(parallel, num_ranks)
    except ValueError:
        return None


def layouts_of_two(first: str, second: str) -> Iterator[tuple[int, ParallelConfig]]:
    """Layouts in which both axes have two ranks: the smallest first, then those with the fewest other axes."""
    for num_ranks in WORLDS:
        options = (1, 2)
        found = []
        for pp, dp_replicate, cp, tp, ep, etp in product(options, repeat=6):
            parallel = ParallelConfig(pp=pp, dp_replicate=dp_replicate, cp=cp, tp=tp, ep=ep, etp=etp)
            sizes = sizes_of(parallel, num_ranks)
            if sizes is not None and getattr(sizes, first) == getattr(sizes, second) == 2:
                found.append((sum(getattr(sizes, axis) > 1 for axis in AXES), len(found), parallel))
        for *_, parallel in sorted(found, key=lambda item: item[:2]):
            for dispatcher in ("alltoall", "local"):
                yield num_ranks, replace(parallel, dispatcher=dispatcher)


def smallest_with(first: str, second: str) -> tuple[int, ParallelConfig] | None:
    """The first of them that the rules accept."""
    for num_ranks, parallel in layouts_of_two(first, second):
        if not check_rules(recipe_of(parallel, MODELS[0], 2), num_ranks):
            return num_ranks, parallel
    return None


PAIRS = {f"{first}-{second}": smallest_with(first, second) for first, second in combinations(AXES, 2)}


def with_many() -> dict[str, ParallelConfig]:
    """Layouts of 4 ranks that have all those pairs between them, each the one with most pairs that others lack; by the
    names of their axes."""
    found, lacking = {}, set(PAIRS)
    for pp, dp_replicate, cp, tp, ep, etp in product((1, 2), repeat=6):
        parallel = ParallelConfig(pp=pp, dp_replicate=dp_replicate, cp=cp, tp=tp, ep=ep, etp=etp, dispatcher="alltoall")
        if (sizes := sizes_of(parallel, 4)) and not check_rules(recipe_of(parallel, MODELS[0], 2), 4):
            found[tuple(axis for axis in AXES if getattr(sizes, axis) == 2)] = parallel
    chosen = {}
    while lacking:
        pairs = {axes: lacking.intersection(f"{one}-{other}" for one, other in combinations(axes, 2)) for axes in found}
        most = max(pairs, key=lambda axes: len(pairs[axes]))
        if not pairs[most]:
            break
        chosen["-".join(most)] = found[most]
        lacking -= pairs[most]
    return chosen


MANY = with_many()


def test_every_pair_of_axes_has_a_layout() -> None:
    assert not [pair for pair, layout in PAIRS.items() if layout is None]
    axes = [name.split("-") for name in MANY]
    assert {f"{one}-{other}" for names in axes for one, other in combinations(names, 2)} == PAIRS.keys()
    assert len(MANY) >= len(MODELS)


@pytest.fixture(scope="module")
def alone(ranks: Any) -> Callable[[str, int, bool, int], Any]:
    """One process, by the name of a model, the idle experts, whether sequences are of documents, and the steps."""

    @cache
    def train(model: str, num_starved: int, is_of_documents: bool, num_steps: int) -> Any:
        recipe = recipe_of(ParallelConfig(), model, 4)
        recipe = replace(recipe, data=DataConfig(document_attention=is_of_documents))
        return one_loss.run(ranks, 1, recipe, num_starved, num_steps)[0]

    return train


def describe(num_ranks: int, recipe: Recipe) -> str:
    p = recipe.parallel
    sizes = sizes_of(p, num_ranks)
    axes = " ".join(f"{axis}{getattr(sizes, axis)}" for axis in AXES if getattr(sizes, axis) > 1)
    kind = [p.cp_kind] if p.cp > 1 else []
    kind += [f"{p.pp_schedule} {p.vpp} {p.pp_layout or 'by FLOPs'}"] if p.pp > 1 else []
    options = (*kind, p.dispatcher, p.overlap, f"clones {p.expert_clones}", f"unsharded {p.accumulate_unsharded}")
    return f"{num_ranks} ranks: {axes}; {', '.join(options)}; recompute {recipe.memory.recompute}"


@pytest.mark.few()
@pytest.mark.parametrize("pair", [pair for pair, layout in PAIRS.items() if layout is not None])
def test_two_axes_train_as_one_process(
    ranks: Any, alone: Callable[[str, int, bool, int], Any], takes_all_steps: bool, pair: str
) -> None:
    layout = PAIRS[pair]
    assert layout is not None
    assert_trains_as_one(ranks, alone, *layout, list(PAIRS).index(pair), takes_all_steps)


@pytest.mark.parametrize("axes", MANY)
def test_several_axes_train_as_one_process(
    ranks: Any, alone: Callable[[str, int, bool, int], Any], takes_all_steps: bool, axes: str
) -> None:
    """Every pair of axes is in one of them."""
    assert_trains_as_one(ranks, alone, 4, MANY[axes], list(MANY).index(axes), takes_all_steps)


def assert_trains_as_one(
    ranks: Any,
    alone: Callable[[str, int, bool, int], Any],
    num_ranks: int,
    parallel: ParallelConfig,
    number: int,
    takes_all_steps: bool,
) -> None:
    """The number chooses all else."""
    model, num_starved = MODELS[number % len(MODELS)], list(STARVED.values())[number % len(STARVED)]
    kinds = [KINDS[(number + shift) % len(KINDS)] for shift in range(len(KINDS))]
    recipes = [in_two(replace(parallel, cp_kind=kind), model, num_ranks) for kind in kinds]
    recipe = next(recipe for recipe in recipes if not check_rules(recipe, num_ranks))
    if number % 2:
        recipe = with_parts(recipe, num_ranks, random.Random(f"parts of {list(PAIRS)[number]}"))
    num_steps = STEPS if takes_all_steps else SOME if number % 7 == 0 else FEW
    for trace in one_loss.run(ranks, num_ranks, recipe, num_starved, num_steps):
        assert len(trace.losses) == num_steps
        one_loss.assert_same(trace, alone(model, num_starved, has_documents(recipe.parallel), num_steps), 1e-9)


OVER_8 = ParallelConfig(ep=8, dispatcher="alltoall")
FOLDINGS = {
    # name: parallel, model, idle experts: references of test_several_axes_train_as_one_process, too
    "tp2-cp2-dp2-ep8": (replace(OVER_8, tp=2, cp=2), "gqa", -1),
    "tp4-dp2-ep4-edp2": (replace(OVER_8, tp=4, ep=4), "gqa-shared", 1),
    "cp8-ep8": (replace(OVER_8, cp=8), "gqa-window", 4),
    "tp2-dp4-etp2-ep4": (replace(OVER_8, tp=2, etp=2, ep=4), "gqa-tied", -1),
    "dp8-ep8-2x4": (replace(OVER_8, dispatcher="hierarchical", ep_ranks_per_node=4), "mla-latent-gate", 4),
}


@pytest.mark.few("dp8-ep8-2x4")
@pytest.mark.parametrize("folding", FOLDINGS)
def test_foldings_of_8_ranks_train_as_one_process(
    ranks: Any, alone: Callable[[str, int, bool, int], Any], takes_all_steps: bool, folding: str
) -> None:
    parallel, model, num_starved = FOLDINGS[folding]
    recipe, num_steps = in_two(parallel, model, 8), STEPS if takes_all_steps else FEW
    assert not check_rules(recipe, 8)
    for trace in one_loss.run(ranks, 8, recipe, num_starved, num_steps):
        one_loss.assert_same(trace, alone(model, num_starved, True, num_steps), 1e-9)


def sample(seed: int) -> tuple[int, Recipe, str, int]:
    """Ranks, recipe, model and idle experts of one of the layouts that the rules accept."""
    draw = random.Random(seed)
    while True:
        num_ranks = draw.choice((2, 4, 4, 8))
        sizes = [size for size in (1, 2, 4, 8) if size <= num_ranks]
        parallel = ParallelConfig(
            pp=draw.choice((1, 1, 2)),
            dp_replicate=draw.choice((1, 1, 2)),
            cp=draw.choice(sizes),
            cp_kind=draw.choice(KINDS),
            tp=draw.choice(sizes),
            ep=draw.choice(sizes),
            etp=draw.choice(sizes),
            dispatcher=draw.choice(list(DISPATCHERS)),
            overlap=draw.choice(("none", "none", "microbatch")),
            expert_clones=draw.choice(("off", "off", "off", "auto", "auto")),
            accumulate_unsharded=draw.choice((False, True)),
            reshard_after_forward=draw.choice((True, True, False)),
            reshard_experts_after_forward=draw.choice((True, True, False)),
        )
        if parallel.cp == 1:
            parallel = replace(parallel, cp_kind=ParallelConfig.cp_kind)
        if parallel.ep == 1 or parallel.pp > 1 or parallel.overlap == "microbatch":
            parallel = replace(parallel, expert_clones="off")  # which "auto" means there
        if parallel.facts.has_two_levels:
            parallel = replace(parallel, ep_ranks_per_node=draw.choice((2, 4)))
        model, num_starved = draw.choice(MODELS), draw.choice(list(STARVED.values()))
        recipe = recipe_of(
            parallel, model, draw.choice((2, 2, 4, 8)), (draw.choice(("none", "none", "experts", "block")),)
        )
        if sizes_of(parallel, num_ranks) is not None and not check_rules(recipe, num_ranks):
            recipe = with_parts(with_schedule(recipe, num_ranks, seed), num_ranks, random.Random(f"parts {seed}"))
            return num_ranks, recipe, model, num_starved


def with_parts(recipe: Recipe, num_ranks: int, draw: random.Random) -> Recipe:
    """The recipe with more that is computed again: each part that the rules accept in all layers, some, or none."""
    for name in RECOMPUTABLE:
        entry = draw.choice((name, name, f"{name}:{draw.choice((1, 2, -1, -2))}", "none"))
        kept = tuple(other for other in recipe.memory.recompute if other not in (AUTO, NONE))
        more = replace(recipe, memory=MemoryConfig((*kept, entry))) if entry != "none" else recipe
        recipe = recipe if name == "block" or check_rules(more, num_ranks) else more
    return recipe


def with_schedule(recipe: Recipe, num_ranks: int, seed: int) -> Recipe:
    """The recipe with one of the schedules that the rules accept, stages a rank and layers a stage, if there is a
    pipeline."""
    if recipe.parallel.pp == 1:
        return recipe
    draw = random.Random(f"schedule {seed}")
    names = draw.sample(list(SCHEDULES), len(SCHEDULES))
    if draw.random() < 2 / 3:  # a third of all layouts allows them
        names.sort(key=lambda name: not SCHEDULES[name].splits_backward)
    for name in names:
        for _ in range(TRIES):
            vpp = draw.randint(SCHEDULES[name].min_vpp, min(SCHEDULES[name].max_vpp, 3))
            layout = draw.choice(("", layout_of(recipe, vpp, draw)))
            drawn = replace(recipe, parallel=replace(recipe.parallel, pp_schedule=name, vpp=vpp, pp_layout=layout))
            if not check_rules(drawn, num_ranks):
                return drawn
    return recipe


def layout_of(recipe: Recipe, vpp: int, draw: random.Random) -> str:
    """Layers in any stages, which may be empty."""
    num_stages = recipe.parallel.pp * vpp
    at = [draw.randrange(num_stages) for _ in range(recipe.model.num_layers)]
    layers = "|".join("t" * at.count(stage) for stage in range(num_stages))
    return f"E{layers}L"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        num_samples = metafunc.config.getoption("--layouts")
        metafunc.parametrize("seed", range(SAMPLES if num_samples is None else num_samples))


def test_a_sample_trains_as_one_process(
    ranks: Any, alone: Callable[[str, int, bool, int], Any], takes_all_steps: bool, seed: int
) -> None:
    num_ranks, recipe, model, num_starved = sample(seed)
    num_steps = STEPS if takes_all_steps else FEW
    expected = alone(model, num_starved, has_documents(recipe.parallel), num_steps)
    print(f"seed {seed}: {model}, {num_starved} idle, {describe(num_ranks, recipe)}")
    for trace in one_loss.run(ranks, num_ranks, recipe, num_starved, num_steps):
        assert len(trace.losses) == num_steps
        one_loss.assert_same(trace, expected, 1e-9)
