"""Bad recipes of seeds: each is refused with its key, its section or its line, or is checked; none raises.

`--all-cases` takes all 1,500 seeds. Times are not asserted.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, check_rules, load_recipe
from titan_moe.config.parallel import smallest_world
from titan_moe.config.parse import blame
from titan_moe.config.renamed import NAMES_ELSEWHERE, SECTIONS_ELSEWHERE, WITHOUT_FIELD
from titan_moe.config.schema import Key, all_keys, in_toml
from titan_moe.plan.check_report import describe

SEEDS_OF_A_CASE = 50
NUM_CASES = 30
FEW_CASES = ("0", "10", "20")
KNOWN = all_keys(Recipe)
FIELDS = [key for key in KNOWN.values() if not key.is_section]
SECTIONS = [key.dotted for key in KNOWN.values() if key.is_section]
NUMBERS = [
    "0",
    "-1",
    "3",
    "7",
    "1.5",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "1e-320",
    "1_000_000",
    "0x7fffffffffffffff",
]
NUMBERS += [str(2**63), str(-(2**63)), str(10**309), "1" + "0" * 5000, "0b101", "1e999", "65536", "999999999999"]
TEXTS = [
    "",
    " ",
    "a\0b",
    "\u202e",
    "é😀",
    "\n",
    "x" * 5000,
    "true",
    "3",
    "1e-3",
    "5 steps",
    "2GB",
    "10m",
    "/dev/zero",
    "../..",
]
OTHER_TYPES = ["[]", "[[1]]", '["a", 1]', "{}", "{a = 1}", "1979-05-27", "07:32:00", "true", "[" * 40 + "]" * 40]
BASES = ["/dev/zero", "missing.toml", ".", "a\0b", "recipe.toml", "fifo", "x" * 300, ""]
SMALL = "[model]\nffn_hidden_size = 64\n"


def _value(rng: random.Random, key: Key) -> str:
    """A value in TOML that the field may take by type, or not."""
    of_type = [in_toml(choice) for choice in key.choices] or (NUMBERS if key.plain_type in (int, float) else ["true"])
    text = in_toml(rng.choice(TEXTS))
    return rng.choice([rng.choice(of_type), rng.choice(of_type), rng.choice(NUMBERS), text, rng.choice(OTHER_TYPES)])


def _fields(rng: random.Random) -> str:
    """Several fields, each of them likely to be wrong, and together in conflict."""
    chosen = rng.sample(FIELDS, rng.randint(1, 12))
    lines = [SMALL.replace("ffn", "# ffn") if rng.random() < 0.3 else ""]
    for section in sorted({key.dotted.rpartition(".")[0] for key in chosen}):
        lines.append(f"[{section}]")
        lines += [f"{k.name} = {_value(rng, k)}" for k in chosen if k.dotted.rpartition(".")[0] == section]
    return "\n".join(lines)


def _conflicts(rng: random.Random) -> str:
    """Layouts, widths and options of the right types that do not fit together."""
    sizes = [1, 2, 3, 4, 5, 6, 8, 16, 48, 64, 100, 1000]
    lines, by_section = [], {}
    for key in rng.sample(FIELDS, 25):
        if key.choices:
            value = in_toml(rng.choice(list(key.choices)))
        elif key.plain_type in (int, float):
            value = str(rng.choice(sizes))
        elif key.plain_type is bool:
            value = rng.choice(["true", "false"])
        else:
            continue
        by_section.setdefault(key.dotted.rpartition(".")[0], []).append(f"{key.name} = {value}")
    for section, keys in by_section.items():
        lines += [f"[{section}]", *keys]
    return "\n".join(lines)


def _of_others(rng: random.Random) -> str:
    """Keys and sections of other frameworks, and keys in a wrong section."""
    names = rng.sample([*NAMES_ELSEWHERE, *WITHOUT_FIELD, *(key.name for key in FIELDS)], 8)
    section = rng.choice([*SECTIONS, *SECTIONS_ELSEWHERE])
    keys = [f"{name.rpartition('.')[2]} = {rng.choice(NUMBERS)}" for name in names]
    return f"[{section}]\n" + "\n".join(dict.fromkeys(keys))


def _nested(rng: random.Random) -> str:
    """Deep, long and odd names and values."""
    depth = rng.choice([5, 40, 400, 3000, 30_000])
    name, field = rng.choice(['""', '"a.b"', '"é\\n"', "'\\u0000'", "a" * 4000, "-", "1"]), rng.choice(FIELDS)
    header = f"[{field.dotted.rpartition('.')[0]}]\n"
    return rng.choice(
        [
            f"{header}{field.name} = {'[' * depth}{']' * depth}",
            f"{header}{field.name} = {'{a = ' * depth}1{'}' * depth}",
            f"{header}{'.'.join(['a'] * depth)} = 1",
            f"[{'.'.join(['a'] * depth)}]\nx = 1",
            f"{header}{name} = 1",
            f"[{name}]\nx = 1",
            header + "\n".join(f"k{number} = 1" for number in range(depth)),
            f"[[{field.dotted.rpartition('.')[0]}]]\n{field.name} = 1",
            f"{header}{field.name}.{name} = 1",
            f"base = {in_toml(rng.choice(BASES))}\n{SMALL}",
            f"base = {rng.choice(NUMBERS[:9] + OTHER_TYPES)}",
        ]
    )


def _damaged(rng: random.Random) -> bytes:
    """A recipe that is cut, has a line twice, or has bytes that are no text."""
    content = bytearray(_conflicts(rng).encode())
    at = rng.randrange(len(content))
    damage = rng.randrange(4)
    if damage == 0:
        return bytes(content[:at])
    if damage == 1:
        lines = bytes(content).split(b"\n")
        return b"\n".join(lines + lines[-2:])
    if damage == 2:
        content[at] = rng.choice(b'\xff\x00\xc3"[]{}=\\\r#.')
        return bytes(content)
    return bytes(content).decode().encode(rng.choice(["utf-16", "utf-32", "utf-8-sig"]))


def _nearly_right(rng: random.Random) -> str:
    """A small recipe with two fields changed to another value of their type; many are right."""
    changed = {"model.num_layers": str(rng.choice([1, 2, 4, 8, 64, 1000])), "model.ffn_hidden_size": "64"}
    for key in rng.sample([key for key in FIELDS if key.choices or key.plain_type in (bool, int)], 2):
        values = [in_toml(choice) for choice in key.choices] or ["true", "false"]
        changed[key.dotted] = rng.choice(values if key.plain_type is not int else ["0", "1", "2", "4", "100", "999999"])
    return "\n".join(f"{dotted} = {value}" for dotted, value in changed.items())


KINDS: list[Callable[[random.Random], str | bytes]] = [
    _fields,
    _nearly_right,
    _conflicts,
    _of_others,
    _nested,
    _damaged,
]


def overrides_of(rng: random.Random) -> list[str]:
    """Arguments of a command line: odd values, keys of others, none of the form."""
    names = [key.dotted for key in FIELDS] + [*NAMES_ELSEWHERE, *SECTIONS, "a.b", "train.", ".steps", "train..steps"]
    texts = [value.strip('"') for value in (*NUMBERS, *TEXTS, *OTHER_TYPES)]
    return [f"--{rng.choice(names)}={rng.choice(texts)}" for _ in range(rng.choice([0, 0, 1, 3]))]


def problems_of_seed(seed: int, folder: Path) -> list[str]:
    """What is refused about the recipe of a seed; it is checked in full if nothing is."""
    rng = random.Random(seed)
    text = KINDS[seed % len(KINDS)](rng)
    file = folder / "recipe.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))
    overrides = overrides_of(rng) if seed % 12 != 1 else []
    try:
        recipe = load_recipe(file, overrides)
        world_size = rng.choice([None, None, 1, 6, 8])
        problems = check_rules(recipe, world_size)  # which imports `model.table`
    except RecipeError as error:
        return error.problems
    if problems:
        return blame(problems, file, overrides)
    assert describe(recipe, world_size or smallest_world(recipe.parallel), rng.choice([None, "H100"]))
    return []


def names_its_place(problem: str) -> bool:
    """Whether a problem names a key, a section, a base, an argument or the part of the file."""
    places = (
        "in [",
        "before the first section",
        "base",
        "command line: --",
        "is a section",
        "known",
        "so it is no recipe",
    )
    return any(place in problem for place in places) or any(dotted in problem for dotted in KNOWN)


@pytest.mark.few(*FEW_CASES)
@pytest.mark.parametrize("case", range(NUM_CASES), ids=str)
def test_bad_recipes_are_refused_with_their_place(case: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    refused = 0
    for seed in range(case * SEEDS_OF_A_CASE, (case + 1) * SEEDS_OF_A_CASE):
        problems = problems_of_seed(seed, tmp_path)
        refused += bool(problems)
        for problem in problems:
            assert names_its_place(problem) and len(problem) < 3000 and problem.isprintable(), f"{seed}: {problem}"
            problem.encode()
    assert refused > SEEDS_OF_A_CASE // 2
