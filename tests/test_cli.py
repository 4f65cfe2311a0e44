"""The command line: answers without torch, refusal of invalid recipes, and torchrun only for valid ones."""

import errno
import gc
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import titan_moe
from titan_moe import cli
from titan_moe.checkpoint.manifest import Manifest
from titan_moe.config import Recipe, load_recipe
from titan_moe.config.resume import flatten
from titan_moe.run import start
from titan_moe.run.failure import EXIT_BAD_RECIPE, EXIT_FAILED, recorded_failures

pytestmark = pytest.mark.slow

QUICKSTART = str(Path(__file__).parents[1] / "recipes" / "quickstart.toml")
QWEN3 = str(Path(__file__).parents[1] / "recipes" / "qwen3_30b_a3b.toml")
TORCHRUN_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Recipes that reached the trainer."""
    recipes: list[Recipe] = []
    trainer = ModuleType("titan_moe.training.trainer")
    trainer.run = recipes.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "titan_moe.training.trainer", trainer)
    return recipes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Numbers of ranks and arguments of `launch` calls. The exit code of the ranks is 7."""
    calls: list[tuple[int, list[str]]] = []

    def launch(num_ranks: int, argv: list[str], limit_s: float) -> int:
        assert limit_s == 600
        calls.append((num_ranks, argv))
        return 7

    module = ModuleType("titan_moe.run.launch")
    module.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "titan_moe.run.launch", module)
    return calls


def run_cli(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, and fail if it imports more than the standard library and this package.

    That is what makes an answer quick; how long it takes depends on the machine. `site` loads modules with "_".
    """
    code = (
        "import sys; from titan_moe.cli import main; code = main();"
        "others = {name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'titan_moe'};"
        "others = sorted(name for name in others if not name.startswith('_'));"
        "sys.exit(f'imported {others}' if others else code)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code, *argv], env=environment | variables, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("device", "variable", "expected"),
    [
        ("auto", "", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("auto", "PYTORCH_ALLOC_CONF", {"PYTORCH_ALLOC_CONF": "a:1"}),
        ("auto", "PYTORCH_CUDA_ALLOC_CONF", {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}),
        ("cpu", "", {}),
    ],
)
def test_gpu_memory_is_allocated_in_expandable_segments_unless_the_user_says_otherwise(
    trained: list[Recipe], monkeypatch: pytest.MonkeyPatch, device: str, variable: str, expected: dict[str, str]
) -> None:
    for name in start.ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "a:1")
    assert cli.main(["train", QUICKSTART, f"--run.device={device}"]) == 0 and len(trained) == 1
    assert {name: os.environ[name] for name in start.ALLOCATOR_VARIABLES if name in os.environ} == expected


def test_check_shows_shape_cost_and_ranks_without_torch() -> None:
    done = run_cli("check", QWEN3, "--nproc", "16", "--train.global_batch_sequences=64")
    assert done.returncode == 0, done.stderr
    for expected in (
        "30.53B, 3.35B active",
        "23.01 GFLOP",
        "dp_shard 16",
        "edp 2 · ep 8",
        "262,144 tokens = microbatches 1",
        "21.3 GiB",
        'kernels     "auto" means "fused"',
    ):
        assert expected in done.stdout


def test_check_says_on_which_nodes_it_takes_the_ranks_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")  # restored after `check` has set it
    two_nodes = ["check", QWEN3, "--nproc", "16", "--parallel.ep=16", "--train.global_batch_sequences=64"]
    assert cli.main(two_nodes) == 0
    assert "ranks       16 on one node; dispatcher symm_mem" in capsys.readouterr().out
    assert cli.main([*two_nodes, "--nproc-per-node", "8"]) == 2
    assert "parallel.ep = 16 does not divide the 8 ranks of a node" in capsys.readouterr().err
    assert cli.main([*two_nodes, "--nproc-per-node", "8", "--parallel.ep=8"]) == 0
    assert "ranks       16 on 2 nodes of 8; dispatcher symm_mem" in capsys.readouterr().out


def test_check_assumes_nodes_of_8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # restored after `check` has set it
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    many = ["check", QWEN3, "--nproc", "64", "--train.global_batch_sequences=256"]
    assert cli.main(many) == 0
    assumed = "64 on 8 nodes of 8, assumed; --nproc-per-node says another; dispatcher symm_mem"
    assert f"ranks       {assumed}" in capsys.readouterr().out
    assert cli.main([*many, "--parallel.ep=64"]) == 2, "GPUs share memory inside a node only"
    refused = capsys.readouterr().err
    assert "parallel.ep = 64 does not divide the 8 ranks of a node" in refused
    assert "nodes of 8 are assumed: --nproc 64 --nproc-per-node says another number" in refused
    assert cli.main([*many, "--parallel.tp=-1"]) == 2 and "are assumed" not in capsys.readouterr().err
    between = ["--parallel.dispatcher=hierarchical", "--parallel.overlap=none", "--compile.cudagraph=off"]
    assert cli.main([*many, "--parallel.ep=32", *between]) == 0
    assert "between nodes of 8 ranks" in capsys.readouterr().out
    few = ["check", QWEN3, "--nproc", "8"]
    assert cli.main(few) == 0 and "ranks       8 on one node; dispatcher" in capsys.readouterr().out
    uneven = ["--train.global_batch_sequences=48", "--parallel.ep=4", "--parallel.dp_replicate=3"]
    assert (
        cli.main(["check", QWEN3, "--nproc", "12", *uneven]) == 0
        and "12 on 2 nodes of at most 8, assumed" in capsys.readouterr().out
    )
    assert cli.main([*many, "--nproc-per-node=64", "--parallel.ep=64"]) == 0
    assert "ranks       64 on one node; dispatcher" in capsys.readouterr().out


def test_ranks_that_are_started_here_are_on_one_node(launched: list[tuple[int, list[str]]]) -> None:
    shared = ["--parallel.ep=16", "--train.global_batch_sequences=64"]
    assert cli.main(["train", QWEN3, "--nproc", "16", *shared]) == 7
    assert launched[0][0] == 16


def test_check_explains_a_key() -> None:
    done = run_cli("check", "--explain", "model.moe.top_k")
    assert done.returncode == 0 and "Number of experts per token" in done.stdout
    done = run_cli("check", "--explain", "model.moe.topk")
    assert done.returncode == 2 and "did you mean model.moe.top_k?" in done.stderr


def test_check_blames_the_command_line_for_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", QUICKSTART, "--optim.lr=nan"]) == 2
    assert "  command line: optim.lr = nan must be finite and above 0" in capsys.readouterr().err


def test_compare_prints_a_table_and_writes_a_page(tmp_path: Path) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    done = run_cli("compare", str(run), "--html", str(page))
    assert done.returncode == 0 and "| loss  | 2.0000 |" in done.stdout, done.stderr
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_compare_names_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text("")
    assert cli.main(["compare", str(tmp_path), str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'} does not exist" in capsys.readouterr().err
    assert cli.main(["compare", str(tmp_path), f"--html={tmp_path}"]) == 2
    assert f"--html {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


def test_check_ignores_a_closed_pipe() -> None:
    command = f"{sys.executable} -m titan_moe check --explain model | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[model]\n" and done.stderr == ""


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("--steps=5", "train.steps"),
        ("--stepz=5", "train.steps"),
        ("--learning_rate=1", "optim.lr"),
        ("--top-k=2", "model.moe.top_k"),
        ("--tensor-parallel-size=2", "parallel.tp"),
        ("--tensor-model-parallel-size=2", "parallel.tp"),
        ("--expert-model-parallel-size=2", "parallel.ep"),
        ("--num-query-groups=2", "model.attention.num_kv_heads"),
        ("--rotary-base=10000", "model.attention.rope_theta"),
        ("--moe-router-topk=2", "model.moe.top_k"),
        ("--moe-ffn-hidden-size=2", "model.moe.ffn_hidden_size"),
        ("--clip-grad=1", "optim.max_grad_norm"),
        ("--num_hidden_layers=2", "model.num_layers"),
        ("--batch_size=8", "train.global_batch_sequences"),
        ("--tokenizer_path=x", "data.tokenizer"),
        ("--checkpoint_path=x", "checkpoint"),
    ],
)
def test_cli_key_without_its_section_is_suggested(capsys: pytest.CaptureFixture[str], argument: str, key: str) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["train", QUICKSTART, argument])
    assert exited.value.code == 2 and f"unknown argument {argument}; recipe" in (stderr := capsys.readouterr().err)
    assert f"did you mean {key}?" in stderr


def test_an_option_of_the_command_with_underscores_is_suggested_with_hyphens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["generate", "RUN", "a prompt", "--max_tokens=5"])
    assert "unknown argument --max_tokens=5; recipe" in (stderr := capsys.readouterr().err)
    assert "did you mean --max-tokens?" in stderr


@pytest.mark.parametrize(
    ("argument", "way_out"),
    [
        ("--nproc-per-node=8", "--nproc N starts N ranks on this host"),
        ("--gpu=H100", "--gpu belongs to titan-moe check and plan"),
        ("--optim=adam", "optim is a section; set its keys, such as optim.kind"),
    ],
)
def test_cli_option_that_is_none_of_the_command_has_a_way_out(
    capsys: pytest.CaptureFixture[str], argument: str, way_out: str
) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["train", QUICKSTART, argument])
    assert exited.value.code == 2 and capsys.readouterr().err.endswith(f"; {way_out}\n")


def test_plan_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--model.num_layers=2", "--parallel.ep=2"
    assert cli.main(["plan", QWEN3, "--nproc=2", "--gpu=H100", f"--write={tmp_path}", *small]) == EXIT_BAD_RECIPE
    assert f"--write {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err


def test_convert_writes_a_recipe_that_is_read_without_torch(tmp_path: Path) -> None:
    job = tmp_path / "job.sh"
    job.write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-experts 8 --bf16 --lr 1e-3")
    result = run_cli("convert", str(job), "--nproc", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert "--nproc 2" in result.stdout
    assert tomllib.loads(result.stdout)["model"]["moe"]["num_experts"] == 8
    job.write_text("--num-layers four")
    refused = run_cli("convert", str(job))
    assert refused.returncode == EXIT_BAD_RECIPE
    assert f'{job}: line 1: --num-layers: model.num_layers = "four" must be an integer' in refused.stderr


def test_train_refuses_a_broken_recipe_at_once_and_without_torch() -> None:
    done = run_cli("train", QWEN3, "--nproc", "8", "--parallel.ep=6", "--train.global_batch_sequences=7")
    assert done.returncode == 2 and done.stdout == ""
    assert "titan-moe: 4 problems" in done.stderr
    assert f"{QWEN3}: parallel.ep = 6 does not divide model.moe.num_experts = 128" in done.stderr
    assert "train.global_batch_sequences = 7" in done.stderr


def test_train_under_torchrun_reports_problems_on_the_first_local_rank() -> None:
    first = run_cli("train", QWEN3, WORLD_SIZE="6", RANK="0", LOCAL_RANK="0")
    assert first.returncode == 2 and "does not divide the 6 ranks" in first.stderr
    start = time.perf_counter()
    other = run_cli("train", QWEN3, WORLD_SIZE="6", RANK="5", LOCAL_RANK="5")
    assert other.returncode == 2 and other.stderr == first.stderr
    assert time.perf_counter() - start > cli.OTHER_RANKS_DELAY_S, "torchrun ends it before this"


@pytest.mark.parametrize(("steps", "exit_code"), [(0, EXIT_BAD_RECIPE), (5, EXIT_FAILED)])
def test_train_rank_records_an_error_before_the_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[Recipe], steps: int, exit_code: int
) -> None:
    """Without a record the launcher takes the signal by which torchrun ends the other ranks for the cause."""

    def fail(recipe: Recipe) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.modules["titan_moe.training.trainer"], "run", fail)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert cli.main(["train", QUICKSTART, f"--train.steps={steps}"]) == exit_code
    (failure,) = recorded_failures(tmp_path)
    assert failure.exit_code == exit_code and ("train.steps = 0" if steps == 0 else "disk is full") in failure.words


def test_train_layout_for_more_ranks_suggests_nproc() -> None:
    refused = run_cli("train", QWEN3)
    assert refused.returncode == 2 and "take --nproc 8 or a multiple" in refused.stderr
    assert "take a divisor" not in refused.stderr


def test_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    done = run_cli("--version")
    assert done.returncode == 0 and done.stdout == f"titan-moe {project['version']}\n", done.stderr
    assert titan_moe.__version__ == project["version"]


def test_train_nproc_must_equal_world_size() -> None:
    refused = run_cli("train", QUICKSTART, "--nproc", "2", WORLD_SIZE="1", RANK="0")
    assert refused.returncode == 2 and "--nproc 2, but WORLD_SIZE = 1 is set" in refused.stderr


def test_cli_wrong_command_line_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (
        ["check", "--gpu", "H77"],
        ["check", "--nproc-per-node=8"],
        ["train", "--nproc", "0"],
        ["train", "--nprocs=2"],
    )
    for words in (["train"], ["check"], [], *([*words, QUICKSTART] for words in wrong)):
        with pytest.raises(SystemExit) as exited:
            cli.main(words)
        assert exited.value.code == 2
    errors = capsys.readouterr().err
    assert (
        "0 is no whole number of at least 1" in errors and "H77 is not a known GPU; known are H200-NVL, H200" in errors
    )


def test_train_of_one_process_runs_in_this_process(
    trained: list[Recipe], launched: list[tuple[int, list[str]]]
) -> None:
    switches = ["--metrics.tensorboard", "False", "--data.document_attention"]  # the second one without a value
    assert cli.main(["train", "--train.steps", "500", *switches, QUICKSTART]) == 0
    assert launched == []
    (recipe,) = trained
    assert recipe.model.name == "quickstart" and recipe.train.steps == 500 and not recipe.metrics.tensorboard
    assert recipe.data.document_attention


def test_train_nproc_launches_ranks_and_returns_their_exit_code(
    trained: list[Recipe], launched: list[tuple[int, list[str]]]
) -> None:
    assert cli.main(["train", QWEN3, "--nproc", "8", "--train.steps", "500", "--optim.lr=1e-4"]) == 7
    assert launched == [(8, ["train", QWEN3, "--train.steps", "500", "--optim.lr=1e-4"])]
    assert trained == []


def test_generate_nproc_launches_ranks(launched: list[tuple[int, list[str]]], tmp_path: Path) -> None:
    """Which get all words but --nproc: torchrun has options of such a name."""
    (tmp_path / ".metadata").touch()
    Manifest(flatten(load_recipe(QUICKSTART)), "", {}).write(tmp_path)
    words = ["generate", str(tmp_path), "a prompt", "--max-tokens", "3", "--seed=2"]
    assert cli.main([*words, "--nproc", "2", "--parallel.tp", "2"]) == 7
    assert cli.main([*words, "--nproc=2", "--parallel.tp=2"]) == 7
    assert launched == [(2, [*words, "--parallel.tp", "2"]), (2, [*words, "--parallel.tp=2"])]
    words = ["generate", str(tmp_path), "--max-tokens", "3", "a prompt", "--seed=2"]
    assert cli.main([*words, "--nproc=2"]) == 7 and launched[2:] == [(2, words)]
    with pytest.raises(SystemExit):
        cli.main([*words, "another"])


def test_trace_nproc_launches_ranks(trained: list[Recipe], launched: list[tuple[int, list[str]]]) -> None:
    assert cli.main(["trace", QWEN3, "--nproc", "8", "--profile.num_steps=2"]) == 7
    assert launched == [(8, ["trace", QWEN3, "--profile.num_steps=2"])]
    assert trained == []


def test_conversions_are_launched_with_their_words(launched: list[tuple[int, list[str]]]) -> None:
    assert cli.main(["import", "theirs", "ours", "--nproc", "4", "--skip", "mtp"]) == 7
    assert cli.main(["export", "ours", "out", "--dtype", "bf16", "--nproc=2"]) == 7
    words = ["import", "theirs", "ours", "--skip=mtp"], ["export", "ours", "out", "--dtype=bf16"]
    assert launched == list(zip((4, 2), map(list, words), strict=True))


def test_train_rank_of_torchrun_runs_in_this_process(
    monkeypatch: pytest.MonkeyPatch, trained: list[Recipe], launched: list[tuple[int, list[str]]]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert cli.main(["train", QWEN3]) == 0
    assert launched == [] and len(trained) == 1


def test_cli_help_lists_verbs_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["-h"])
    assert exited.value.code == 0
    help_text = capsys.readouterr().out
    for word in ("trace", "check", "--train.steps=50", "--explain", "torchrun"):
        assert word in help_text


def test_removed_command_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["tune", QWEN3, "--nproc", "8", "--out", "table.toml"])
    assert exited.value.code == 2
    assert "error: nothing is tuned any more: " in capsys.readouterr().err


def test_cli_imports_are_frozen_for_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    with start.imports_frozen():
        assert gc.isenabled(), "a process that has imported torch before may have garbage"
    monkeypatch.delitem(sys.modules, "torch")
    frozen = gc.get_freeze_count()
    try:
        with start.imports_frozen():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
