"""Random jobs of other frameworks: each becomes a recipe that is read again, or is refused with its line; none raises.

`--all-cases` takes more seeds.
"""

import random
from pathlib import Path

import pytest

from titan_moe.config import RecipeError, load_recipe
from titan_moe.config.migrate.convert import recipe_of_job
from titan_moe.config.migrate.given import OWN_NAMES
from titan_moe.config.migrate.translate import OWNED
from titan_moe.config.migrate.values import AGREEING, DEFAULTS
from titan_moe.config.renamed import NAMES_ELSEWHERE, WITHOUT_FIELD

NAMES = sorted({*OWNED, *OWN_NAMES, *NAMES_ELSEWHERE, *AGREEING, *DEFAULTS["torchtitan"]} | set(WITHOUT_FIELD))
WORDS = """
0 1 2 3 7 8 48 64 128 1000 -1 -5 1.5 1e-3 0.0 nan inf -inf 1e999 0x10 true false none null bf16 fp32 rope adam
selective full block uniform core_attn moe_act aux_loss seq_aux_loss sigmoid softmax cosine WSD linear
deepep flex allgather p2p a2a e4m3 hybrid tensorwise blockwise mxfp8 torch.bfloat16 torch.float32 qwen3 30B-A3B
([0]*3+[1]*58) [0,1] [1]*9 ([0]*99999999999) 99,1,0 4096,0 $1 ${X:-3} $((2*3)) $((1//0)) `a` $(b
Et*3|(tt|)*29tL E||L (t*)* 'a"b " ' \\ # é😀 {} {a:1} [a [[1]] &x *x !x | > %
"""
VALUES = [*WORDS.split(), str(2**63), "1" + "0" * 5000, "x" * 300, "", "\t", "a.bin b.bin", "0.5 a 0.5 b", "[a, b]"]
SMALL = {"num_layers": "4", "hidden_size": "64", "num_attention_heads": "4", "num_experts": "8"}


def _job(rng: random.Random) -> tuple[str, str]:
    """The text of a job, and the ending of its file."""
    names = rng.sample(NAMES, rng.randint(0, 14))
    pairs = list((SMALL if rng.random() < 0.7 else {}).items()) + [(name, rng.choice(VALUES)) for name in names]
    kind = rng.randrange(4)
    if kind == 0:
        pairs = [(f"--{name.rpartition('.')[2].replace('_', '-')}", value) for name, value in pairs]
        words = [f"{name} {value}".strip() if rng.random() < 0.8 else name for name, value in pairs]
        return rng.choice([" ", " \\\n", "\n"]).join(words), ".sh"
    if kind == 1:
        return "\n".join(f"{'  ' * rng.randrange(3)}{name}: {value}" for name, value in pairs), ".yaml"
    if kind == 2:
        return "\n".join(f"{name if '.' in name else 'model.' + name}={value}" for name, value in pairs), ".txt"
    return _titan(pairs, rng), ".toml"


def _titan(pairs: list[tuple[str, str]], rng: random.Random) -> str:
    sections: dict[str, dict[str, str]] = {}
    for name, value in pairs:
        section, _, last = name.rpartition(".")
        words = value if rng.random() < 0.5 and value.replace(".", "").isdecimal() else f"'''{value}'''"
        sections.setdefault(section or rng.choice(["model", "training", "x.y"]), {})[last] = words
    lines = []
    for section in sorted(sections):
        lines += [f"[{section}]", *(f"{name} = {value}" for name, value in sections[section].items())]
    return "\n".join(lines)


@pytest.mark.few("0")
@pytest.mark.parametrize("case", range(40))
def test_a_random_job_is_converted_or_refused_with_its_place(case: int, tmp_path: Path) -> None:
    for seed in range(case * 25, case * 25 + 25):
        rng = random.Random(seed)
        text, ending = _job(rng)
        file, recipe = tmp_path / f"job{ending}", tmp_path / "recipe.toml"
        file.write_text(text)
        try:
            converted = recipe_of_job(file, rng.choice([None, None, 1, 8, 64]))
        except RecipeError as refused:
            assert refused.problems
            assert all(str(file) in problem or "line" in problem for problem in refused.problems), text
            continue
        recipe.write_text(converted)
        load_recipe(recipe)
