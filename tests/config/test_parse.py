"""Parsing of recipe files and overrides; all problems are reported together."""

import dataclasses
import math
import os
from pathlib import Path

import pytest

from titan_moe.config import Recipe, RecipeError, dump_recipe, load_recipe
from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.config.parse import blame, recipe_of
from titan_moe.config.schema import all_keys
from titan_moe.config.train import RunConfig


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def problems_of(file: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        load_recipe(file, overrides)
    assert str(raised.value) == "\n".join(raised.value.problems)
    return raised.value.problems


def test_parse_empty_file_is_the_default_recipe(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "r.toml", "")) == Recipe()


def test_parse_sets_fields(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "r.toml",
        """
        [model]
        class = "my.module:Model"
        hidden_size = 64
        [model.moe]
        route_scale = 2          # an integer for a float
        score_fn = "sigmoid"
        [metrics]
        tensorboard = false
        """,
    )
    recipe = load_recipe(file)
    assert recipe.model.class_ == "my.module:Model"
    assert recipe.model.hidden_size == 64
    assert recipe.model.moe.route_scale == 2.0 and type(recipe.model.moe.route_scale) is float
    assert recipe.model.moe.score_fn == "sigmoid"
    assert recipe.metrics.tensorboard is False
    assert recipe.optim == Recipe().optim


def test_parse_table_of_names_is_merged_name_by_name(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", '[validation.sets]\ncode = "a.txt"\n"my set" = "~/b.txt"')
    file = write(tmp_path, "r.toml", 'base = "base.toml"\n[validation]\nsets = { code = "c.txt", d = "d.txt" }')
    recipe = load_recipe(file, ["--validation.sets.d=e.txt", "--validation.sets.f", "f.txt"])
    sets = {"code": "c.txt", "my set": os.path.expanduser("~/b.txt"), "d": "e.txt", "f": "f.txt"}
    assert recipe.validation.sets == sets and hash(recipe) == hash(recipe)
    assert load_recipe(write(tmp_path, "again.toml", dump_recipe(recipe))) == recipe
    assert recipe_of({"validation.sets": sets}, "here").validation.sets == sets


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sets = 3", "validation.sets = 3 must be a table of strings; set its names one by one: validation.sets.NAME"),
        ("sets = { a = 3 }", "validation.sets.a = 3 must be a string"),
        ("[validation.sets.a]\nb = 3", "validation.sets.a = a table must be a string"),
    ],
)
def test_parse_table_has_strings(tmp_path: Path, text: str, problem: str) -> None:
    file = write(tmp_path, "r.toml", f"[validation]\n{text}")
    assert problems_of(file) == [f"{file}: {problem}"]


def test_parse_merges_bases_key_by_key(tmp_path: Path) -> None:
    write(tmp_path, "models/root.toml", "[model]\nhidden_size = 1\nnum_layers = 1\n[model.moe]\ntop_k = 1")
    write(tmp_path, "models/mid.toml", 'base = "root.toml"\n[model]\nnum_layers = 2\n[model.moe]\nnum_experts = 2')
    file = write(tmp_path, "r.toml", 'base = "models/mid.toml"\n[model.moe]\nnum_experts = 3')
    recipe = load_recipe(file, ["--model.moe.latent_size=4"])
    assert (recipe.model.hidden_size, recipe.model.num_layers) == (1, 2)
    assert (recipe.model.moe.top_k, recipe.model.moe.num_experts, recipe.model.moe.latent_size) == (1, 3, 4)


def test_parse_refuses_a_base_cycle(tmp_path: Path) -> None:
    write(tmp_path, "b.toml", 'base = "a.toml"')
    (problem,) = problems_of(write(tmp_path, "a.toml", 'base = "b.toml"'))
    assert "closes a cycle" in problem and "a.toml -> " in problem and "b.toml" in problem


def test_parse_missing_base_error_names_both_files(tmp_path: Path) -> None:
    write(tmp_path, "models/real.toml", "")
    file = write(tmp_path, "r.toml", 'base = "models/reel.toml"')
    (problem,) = problems_of(file)
    assert problem.startswith(f"{file}: base: {tmp_path / 'models/reel.toml'} does not exist")
    assert "real.toml" in problem


def test_parse_refuses_a_base_that_is_not_a_string(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, "r.toml", "base = 3"))
    assert "base = 3 must be a string" in problem


def test_parse_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    assert "does not exist" in problems_of(tmp_path / "r.toml")[0]
    write(tmp_path, "one.toml", "")
    assert problems_of(tmp_path) == [f"{tmp_path} is a folder; {tmp_path}/ contains one.toml"]


def test_parse_missing_file_at_the_root_of_a_repository_names_its_recipes(tmp_path: Path) -> None:
    write(tmp_path, "pyproject.toml", "")
    assert problems_of(tmp_path / "one.toml")[0].endswith(f"; {tmp_path}/ contains no recipe")
    write(tmp_path, "recipes/one.toml", "")
    assert problems_of(tmp_path / "one.toml")[0].endswith(f"; {tmp_path}/recipes/ contains one.toml")


def test_parse_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    file = write(tmp_path, "r.toml", "[run]\nseed = = 3")
    (problem,) = problems_of(file)
    assert str(file) in problem and "line 2" in problem


def test_parse_reports_all_problems_with_file_and_key(tmp_path: Path) -> None:
    base = write(tmp_path, "base.toml", "[model]\nhidden_sise = 3")
    file = write(
        tmp_path,
        "r.toml",
        """
        base = "base.toml"
        parallel = 3
        [train]
        steps = "many"
        seq_len_tokens = true
        [optim]
        lr = false
        [metrics]
        tensorboard = 1
        [perf]
        kernels = "fast"
        [model]
        top_k = 3
        [model.moe.router]
        bias = 3
        [trian]
        steps = 3
        """,
    )
    problems = "\n".join(problems_of(file, "--train.stepps=3"))
    for expected in (
        f"{base}: model.hidden_sise is not a known key; did you mean model.hidden_size?",
        f"{file}: parallel is a section",
        f'{file}: train.steps = "many" must be an integer',
        f"{file}: train.seq_len_tokens = true must be an integer",
        f"{file}: optim.lr = false must be a number",
        f"{file}: metrics.tensorboard = 1 must be true or false",
        f'{file}: perf.kernels = "fast" must be one of "auto", "grouped_mm", "fused", "reference"',
        f"{file}: model.top_k is not a known key; did you mean model.moe.top_k?",
        f"{file}: model.moe.router is not a known section; did you mean model.moe?",
        f"{file}: trian is not a known section; did you mean train?",
        "command line: train.stepps is not a known key; did you mean train.steps?",
    ):
        assert expected in problems
    assert problems.count("\n") == 10


@pytest.mark.parametrize(
    ("argv", "dotted", "expected"),
    [
        (["--train.steps=50"], "train.steps", 50),
        (["--model.moe.top_k", "4"], "model.moe.top_k", 4),
        (["--parallel.dp_shard", "-1"], "parallel.dp_shard", -1),
        (["--optim.lr=1e-4"], "optim.lr", 1e-4),
        (["--optim.lr", "1"], "optim.lr", 1.0),
        (["--metrics.tensorboard=false"], "metrics.tensorboard", False),
        (["--data.document_attention"], "data.document_attention", True),
        (["--data.document_attention", "false"], "data.document_attention", False),
        (["--data.document_attention", "--train.steps=1"], "data.document_attention", True),
        (["--data.path=a=b c"], "data.path", "a=b c"),
        (["--data.path=3"], "data.path", "3"),
        (["--data.path="], "data.path", ""),
        (["--parallel.dispatcher", "alltoall"], "parallel.dispatcher", "alltoall"),
        (["--train.steps=1", "--train.steps=2"], "train.steps", 2),
    ],
)
def test_parse_converts_overrides_to_the_fields_type(
    tmp_path: Path, argv: list[str], dotted: str, expected: object
) -> None:
    value: object = load_recipe(write(tmp_path, "r.toml", "[train]\nsteps = 7"), argv)
    for name in dotted.split("."):
        value = getattr(value, name)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--train.steps=1.5", "train.steps = 1.5 must be an integer"),
        ("--train.steps", "--train.steps needs a value, an integer"),
        ("--metrics.tensorboard=1", "metrics.tensorboard = 1 must be true or false"),
        ("--run.folder", "--run.folder needs a value, a string"),
        ("--optim.lr", "--optim.lr needs a value, a number"),
        ("--parallel.dispatcher=deepep", 'must be one of "local", "allgather", "alltoall"'),
        ("--optim.learning_rate=1", "optim.learning_rate is not a known key; did you mean optim.lr?"),
        ("--model.moe=3", "model.moe is a section"),
        ("steps=3", "is not of the form --section.key=value"),
    ],
)
def test_parse_refuses_invalid_overrides(tmp_path: Path, argument: str, message: str) -> None:
    (problem,) = problems_of(write(tmp_path, "r.toml", ""), argument)
    assert problem.startswith("command line: ") and message in problem


def test_dump_recipe_round_trip(tmp_path: Path) -> None:
    recipe = Recipe()
    recipe = dataclasses.replace(
        recipe,
        run=dataclasses.replace(recipe.run, folder='a "b"\\c\té 😀\x7f\x01\n', seed=2**60),
        optim=dataclasses.replace(recipe.optim, lr=1e-300, eps=0.1 + 0.2, max_grad_norm=math.inf),
        model=dataclasses.replace(recipe.model, class_="a.b:C", embeddings_are_tied=True),
    )
    text = dump_recipe(recipe)
    assert load_recipe(write(tmp_path, "r.toml", text)) == recipe
    written = [key for key in all_keys(Recipe).values() if not key.is_section and f"\n{key.name} = " in text]
    assert len(written) == sum(not key.is_section for key in all_keys(Recipe).values()), "a dump contains every field"
    assert text.index("[run]") < text.index("[model.moe]") < text.index("[parallel]") < text.index("[profile]")


def test_parse_huge_integer_for_a_float_is_infinite(tmp_path: Path) -> None:
    for sign in (1, -1):
        recipe = load_recipe(write(tmp_path, "r.toml", f"[optim]\nlr = {sign * 10**400}"))
        assert recipe.optim.lr == sign * math.inf


def test_the_recipe_that_a_run_wrote_means_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = dump_recipe(Recipe())
    resolved = write(tmp_path / "moved", "recipe.toml", text)
    write(tmp_path / "moved", "environment.json", "{}")
    assert load_recipe(resolved) == dataclasses.replace(Recipe(), run=RunConfig(folder=str(tmp_path / "moved")))
    assert load_recipe(resolved, ["--run.folder=elsewhere"]).run.folder == "elsewhere"
    monkeypatch.chdir(tmp_path)
    assert load_recipe("moved/recipe.toml").run.folder == "moved"
    monkeypatch.chdir(tmp_path / "moved")
    assert load_recipe("recipe.toml").run.folder == str(tmp_path / "moved")


@pytest.mark.parametrize(("kind", "expected"), [("mla", 1e-5), ("gqa", 1e-6)])
def test_the_recipe_of_a_run_without_a_later_field_means_what_the_run_did(
    tmp_path: Path, kind: str, expected: float
) -> None:
    attention = dataclasses.replace(AttentionConfig(), kind=kind)
    recipe = dataclasses.replace(Recipe(), model=ModelConfig(norm_eps=1e-5, attention=attention))
    lines = [line for line in dump_recipe(recipe).splitlines() if not line.startswith("latent_norm_eps")]
    earlier = write(tmp_path / "run", "recipe.toml", "\n".join(lines))
    assert load_recipe(earlier).model.attention.latent_norm_eps == 1e-6, "no run's: the default"
    write(tmp_path / "run", "environment.json", "{}")
    assert load_recipe(earlier).model.attention.latent_norm_eps == expected
    key = "model.attention.latent_norm_eps"
    assert load_recipe(earlier, [f"--{key}=1e-3"]).model.attention.latent_norm_eps == 1e-3
    write(tmp_path / "run", "recipe.toml", dump_recipe(recipe))
    assert load_recipe(earlier).model.attention.latent_norm_eps == 1e-6, "it has the field"


def test_a_copy_of_a_runs_recipe_is_an_ordinary_recipe(tmp_path: Path) -> None:
    for name in ("recipe.toml", "copy.toml"):
        write(tmp_path / name, name, dump_recipe(Recipe()))
    write(tmp_path / "copy.toml", "environment.json", "{}")
    for name in ("recipe.toml", "copy.toml"):
        assert load_recipe(tmp_path / name / name).run.folder == RunConfig().folder


@pytest.mark.parametrize("text", ['["a.*", "b"]', "a.*,b", "a.*, b", "['a.*', 'b']"])
def test_parse_list_on_the_command_line(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, "r.toml", "")
    recipe = load_recipe(file, [f"--precision.modules_in_compute={text}"])
    assert recipe.precision.modules_in_compute == ("a.*", "b")
    assert load_recipe(write(tmp_path, "saved.toml", dump_recipe(recipe))) == recipe


def test_parse_list_in_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, "r.toml", '[precision]\nmodules_in_compute = ["layers.0.*"]')
    assert load_recipe(file).precision.modules_in_compute == ("layers.0.*",)
    assert load_recipe(file, ["--precision.modules_in_compute="]).precision.modules_in_compute == ()
    assert load_recipe(file, ["--precision.modules_in_compute=layers.[01].*"]).precision.modules_in_compute == (
        "layers.[01].*",
    )


@pytest.mark.parametrize("text", ["2,0", "[2, 0]", "2, 0"])
def test_parse_list_of_integers(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, "r.toml", "[model]\ndense_layers = [7]")
    assert load_recipe(file).model.dense_layers == (7,)
    recipe = load_recipe(file, [f"--model.dense_layers={text}"])
    assert recipe.model.dense_layers == (2, 0)
    assert load_recipe(write(tmp_path, "saved.toml", dump_recipe(recipe))) == recipe
    assert load_recipe(file, ["--model.dense_layers=3"]).model.dense_layers == (3,)
    for text in ("[1, 2.5]", "1,2.5"):
        longrope = load_recipe(file, [f"--model.attention.longrope_long_factor={text}"]).model.attention
        assert longrope.longrope_long_factor == (1.0, 2.5)
    (problem,) = problems_of(write(tmp_path, "wrong.toml", "[model]\ndense_layers = [1, true]"))
    assert "model.dense_layers = [1, true] must be a list of integers" in problem


def test_parse_refuses_a_list_with_nul_characters_on_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="must be valid text without NUL"):
        load_recipe(write(tmp_path, "r.toml", ""), ["--precision.modules_in_compute=a\0b"])


@pytest.mark.parametrize("value", ["3", '"layers.0.*"', "[1]", '["a", 1]'])
def test_parse_refuses_what_is_no_list_of_strings(tmp_path: Path, value: str) -> None:
    file = write(tmp_path, "r.toml", f"[precision]\nmodules_in_compute = {value}")
    (problem,) = problems_of(file)
    assert f"precision.modules_in_compute = {value} must be a list of strings" in problem


@pytest.mark.parametrize(
    "key",
    [
        "run.folder",
        "data.path",
        "data.files",
        "data.tokenizer",
        "data.cache_folder",
        "validation.path",
        "checkpoint.load_from",
    ],
)
def test_parse_home_folder_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """A shell expands `~` at the start of a word only, so neither in --run.folder=~/run nor in a file."""
    monkeypatch.setenv("HOME", "/home/me")
    section, name = key.split(".")
    (tmp_path / "base.toml").write_text(f'[{section}]\n{name} = "~/a/*"\n')
    for recipe in (load_recipe(tmp_path / "base.toml"), load_recipe(tmp_path / "base.toml", [f"--{key}=~/a/*"])):
        assert getattr(getattr(recipe, section), name) == "/home/me/a/*"
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "child.toml").write_text('base = "~/base.toml"\n')
    assert getattr(getattr(load_recipe(tmp_path / "child.toml"), section), name) == f"{tmp_path}/a/*"
    assert load_recipe(tmp_path / "base.toml", ["--model.name=~/a"]).model.name == "~/a", "no path"


BRACKETS = "[" * 3000
LONG_NAME = ".".join(["a"] * 30_000)
UNREADABLE = {
    "integer of 310 digits": ("[train]\nsteps = 1" + "0" * 309, "train.steps = an integer of 1,027 bits must be"),
    "integer of a million bits": ("[optim]\nlr = 0x" + "f" * 50_000, None),
    "integer of 5000 digits": ("[run]\n[train]\nsteps = 1" + "0" * 5000, "too many digits; in [train]: steps = 100"),
    "brackets": (f"[train]\nsteps = {BRACKETS}", "nest too deeply; in [train]: steps = [[["),
    "closed brackets": (f"[optim]\nlr = {BRACKETS}{BRACKETS.replace('[', ']')}", "nest too deeply; in [optim]: lr"),
    "tables in tables": ("[data]\npath = " + "{a=" * 3000, "nest too deeply; in [data]: path = {a="),
    "names in names": (f"[model]\n{LONG_NAME} = 1", "more than 16 dots (at line 2); in [model]: a.a."),
    "lists in a list": ("[train]\nsteps = [[[[[[1]]]]]]", "train.steps = [[...]] must be an integer"),
    "a long text": (f'[train]\nsteps = "{"x" * 9999}"', "train.steps = " + '"' + "x" * 119 + "... must be an integer"),
    "a table": ("[train.steps]\na.b = 1", "train.steps = a table must be an integer"),
    "no UTF-8": ("[run]\n[data]\npath = '\udcff'", "byte 0xff at line 3 is not UTF-8; save it as UTF-8; in [data]"),
    "a wide encoding": ("\udcff\udcfe[\0r\0u\0n\0]\0", "byte 0xff at line 1 is not UTF-8"),
    "a cut file": ('[optim]\nlr = 1e-3\n[data]\npath = "cor', "in [data]: path ="),
    "a name twice": ("[optim]\nlr = 1\nlr = 2", "in [optim]: lr = 2"),
    "NUL in a path": ('[data]\npath = "a\\u0000b"', 'data.path = "a\\u0000b" must be valid text without NUL'),
    "NUL in a list": ('[precision]\nmodules_in_compute = ["a\\u0000"]', "precision.modules_in_compute = "),
    "NUL in a base": ('base = "a\\u0000b"', 'base = "a\\u0000b" must be a path'),
    "a quoted name with a dot": ('"train.steps" = 3', '"train.steps" is not a known key'),
    "an empty name": ('[train]\n"" = 3', 'train."" is not a known key'),
    "a name with a line break": ('[train]\n"a\\nb" = 3', "train.a\\nb is not a known key"),
    "many unknown names": ("[train]\n" + "\n".join(f"k{n} = 1" for n in range(9000)), "8980 more keys not known"),
}


@pytest.mark.parametrize(("text", "expected"), UNREADABLE.values(), ids=UNREADABLE)
def test_parse_refuses_what_no_recipe_has_and_names_the_place(tmp_path: Path, text: str, expected: str | None) -> None:
    file = tmp_path / "r.toml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    if expected is None:
        assert load_recipe(file).optim.lr == math.inf  # its range refuses it
        return
    problems = problems_of(file)
    assert any(expected in problem for problem in problems) and all(str(file) in problem for problem in problems)
    assert len(problems) <= 21 and max(map(len, problems)) < len(str(file)) + 400


def test_parse_reads_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load_recipe(file).train.steps == 3


@pytest.mark.parametrize(
    "key", ["--data.path=a\0b", "--data.path=\udcff", "--train.steps=1" + "0" * 309, f"--run.seed={2**63}"]
)
def test_parse_refuses_such_values_on_the_command_line(tmp_path: Path, key: str) -> None:
    (problem,) = problems_of(write(tmp_path, "r.toml", ""), key)
    assert problem.startswith(f"command line: {key[2:].partition('=')[0]} = ")
    problem.encode()


@pytest.mark.parametrize("as_base", [True, False])
def test_parse_reads_only_regular_files_of_the_size_of_a_recipe(tmp_path: Path, as_base: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    write(tmp_path, "large.toml", "#" * 300_000)
    expected = {"fifo": "is not a regular file", "/dev/zero": "is not a regular file", "loop": "cannot be read"}
    for name, reason in (expected | {"large.toml": "has more than 262,144 bytes", "n" * 300: "cannot be read"}).items():
        file = write(tmp_path, "r.toml", f'base = "{name}"') if as_base else tmp_path / name
        (problem,) = problems_of(file)
        assert problem.startswith(f"{file}: base: " if as_base else f"{file} ") and reason in problem


def test_parse_refuses_an_endless_chain_of_bases(tmp_path: Path) -> None:
    for number in range(2000):
        write(tmp_path, f"{number}.toml", f'base = "{number + 1}.toml"')
    (problem,) = problems_of(tmp_path / "0.toml")
    assert 'base = "33.toml" is more than 32 bases' in problem


def test_parse_missing_file_names_the_nearest_of_many(tmp_path: Path) -> None:
    for number in range(2400):
        (tmp_path / f"sweep_{number}.toml").touch()
    write(tmp_path, "qwen3_30b.toml", "")
    (problem,) = problems_of(tmp_path / "qwen_30b.toml")
    assert "contains qwen3_30b.toml, " in problem and problem.endswith(" and 2,396 more")
    (problem,) = problems_of(tmp_path / "sweep_777x.toml")
    assert "contains sweep_777.toml, " in problem and problem.endswith(" and 2,396 more")


@pytest.mark.parametrize(
    ("problem", "source"),
    [
        ("optim.lr = nan must be finite and above 0 (the value is out of range)", "command line"),
        ("optim.eps = -1.0 must be above 0 (the value is out of range)", "base.toml"),
        ("optim.beta1 = 2.0 must be at least 0 and below 1 (the value is out of range)", "r.toml"),
        ("optim.lr = 1 and optim.eps = 2 differ; set optim.beta1 (a reason)", "r.toml"),
        ("optim.lr = 1 is odd; set optim.eps = 2 (a reason)", "command line"),
        ("train.steps = 0 must be at least 1", "r.toml"),
    ],
)
def test_blame_names_the_command_line_or_the_file_that_set_the_fields(
    tmp_path: Path, problem: str, source: str
) -> None:
    write(tmp_path, "base.toml", "[optim]\nlr = 1\neps = -1.0")
    file = write(tmp_path, "r.toml", 'base = "base.toml"\n[optim]\nbeta1 = 2.0')
    place = source if source == "command line" else tmp_path / source
    assert blame([problem], file, ["--optim.lr=nan"]) == [f"{place}: {problem}"]
