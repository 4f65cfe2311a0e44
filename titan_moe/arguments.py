"""The arguments of `titan-moe`: its commands, and what each takes."""

import argparse
import math
from typing import Any

from titan_moe.config.parallel import ASSUMED_RANKS_OF_A_NODE
from titan_moe.plan.choice.hardware import KNOWN_DEVICES, find_hardware

MOST_COPIES = 4096
"""Of an MLP, and pieces of it."""
SECONDS_OF_A_CALIBRATION = 90.0
OF_AVERAGES = "of the averages of weights that the run keeps (optim.ema_decay)"
RATES = "rates of a GPU and its links that titan-moe calibrate has measured, instead of the shipped ones"
EPILOG = """\
any field of the recipe can be overridden:  --train.steps=50  --model.moe.top_k 4  --metrics.tensorboard=false
what a field means:                         titan-moe check --explain model.moe.top_k
several nodes, on each of them:             torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d
                                              --rdzv-endpoint HOST:29500 -m titan_moe train RECIPE.toml
"""


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="titan-moe",
        description="Train Mixture-of-Experts models from one recipe.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    launched = "number of ranks to start on this host, through torchrun; default 1"
    planned = "number of ranks of the run; default: the smallest number that the layout allows"
    purpose = "train a recipe, on N processes with --nproc"
    _add_verb(verbs, "train", purpose, "the recipe, or RUN/recipe.toml to resume a run", launched)
    purpose = "profile a few steps of a recipe and write an HTML report"
    _add_verb(verbs, "trace", purpose, "the recipe; the report is written into RUN/trace", launched)
    purpose = "check a recipe and show its shape and cost, without importing torch"
    options = "[--nproc-per-node N] [--gpu NAME] [--json] [--explain [KEY]] "
    checked = _add_verb(verbs, "check", purpose, "the recipe", planned, options, nargs="?")
    of_node = f"number of ranks on a node; default: all, at most {ASSUMED_RANKS_OF_A_NODE}"
    checked.add_argument("--nproc-per-node", type=_positive, metavar="N", help=of_node)
    gpus = "of this machine; without one, those with measured kernels"
    compared = (
        f"GPU whose memory the peak of a step is compared with, such as H100 or A100-80GB; default: the GPUs {gpus}"
    )
    checked.add_argument("--rates", metavar="FILE", help=RATES)
    checked.add_argument("--gpu", type=_gpu, metavar="NAME", help=f"{compared}. Its speed is predicted too")
    checked.add_argument("--json", action="store_true", help="print one object of JSON, with breaches of rules")
    explained = "explain a field or a section of recipes; without KEY list all fields"
    checked.add_argument("--explain", metavar="KEY", nargs="?", const="", help=explained)
    _add_plan(verbs)
    purpose = "measure what this host's GPUs and their links reach, in 90 s: a table for --rates of plan and check"
    measured = verbs.add_parser("calibrate", help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    measured.add_argument("--nproc", type=_positive, metavar="N", help=f"{launched}, without links")
    measured.add_argument("--out", metavar="FILE", help="the table, TOML, written anew as it grows; default: printed")
    limit = f"limit of the whole, which leaves out what has no time; default {SECONDS_OF_A_CALIBRATION:.0f}"
    measured.add_argument("--seconds", type=_seconds, default=SECONDS_OF_A_CALIBRATION, metavar="S", help=limit)
    purpose = "print all fields of recipes at their defaults, with explanations, as one TOML"
    of_hf = "a Hugging Face checkpoint; prints the recipe that trains it on, with what was assumed"
    printed = verbs.add_parser("recipe", help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    printed.add_argument("folder", nargs="?", metavar="HF_FOLDER", help=of_hf)
    upcycle = "of a dense model: make so many copies of each MLP the experts of a MoE model"
    printed.add_argument("--upcycle", type=_copies, metavar="COPIES", help=upcycle)
    granularity = "with --upcycle, cut each MLP into so many pieces, copies of which are the experts; default 1"
    printed.add_argument("--granularity", type=_copies, metavar="G", help=granularity)
    purpose = "print the recipe of a job of torchtitan, Megatron-Core or Megatron-Bridge"
    of_job = "torchtitan's TOML, a script or list of Megatron's arguments, or YAML or overrides of Bridge"
    converted = verbs.add_parser("convert", help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    converted.add_argument("job", metavar="FILE", help=of_job)
    converted.add_argument("--nproc", type=_positive, metavar="N", help=planned)
    _add_conversions(verbs)
    _add_uses(verbs, launched)
    return parser


def _add_plan(verbs: Any) -> None:
    """Add the command that searches for layouts."""
    purpose = "find the fastest layouts of a recipe that fit the memory of GPUs, by prediction, without importing torch"
    options = (
        "[--nproc-per-node N] [--gpu NAME] [--rates FILE] [--top N] [--json] [--write FILE] [--fit] [--what-if [BASE]] "
    )
    nproc = "number of ranks of the run; with --fit the most"
    verb = _add_verb(verbs, "plan", purpose, "the recipe, whose model, batch and precision are kept", nproc, options)
    of_node = f"number of ranks on a node; default: all, at most {ASSUMED_RANKS_OF_A_NODE}"
    verb.add_argument("--nproc-per-node", type=_positive, metavar="N", help=of_node)
    verb.add_argument(
        "--gpu", type=_gpu, metavar="NAME", help="GPU, such as H200; default: that of this machine, or H100"
    )
    verb.add_argument("--rates", metavar="FILE", help=RATES)
    tokens = "tokens of an optimizer step, instead of train.global_batch_sequences"
    verb.add_argument("--tokens-per-step", type=_positive, metavar="N", help=tokens)
    verb.add_argument("--top", type=_positive, default=10, metavar="N", help="layouts to show; default 10")
    verb.add_argument("--json", action="store_true", help="print the layouts as JSON")
    verb.add_argument("--write", metavar="FILE", help="write the best layout as a recipe that bases on this one")
    verb.add_argument("--fit", action="store_true", help="the fewest GPUs that hold a step, and their best layout")
    changed = "show a layout with one thing changed each, instead of the table: the best one, or that of the recipe"
    verb.add_argument("--what-if", nargs="?", const="best", choices=("best", "recipe"), help=changed)


def _add_conversions(verbs: Any) -> None:
    """Add the commands that import and export checkpoints of Hugging Face."""
    folders = {"checkpoint": ("CHECKPOINT", "a checkpoint of a run, RUN/checkpoints/step-N, or an imported one")}
    folders["folder"] = "HF_FOLDER", "a Hugging Face checkpoint: config.json and safetensors files"
    purposes = {
        "import": ("make a checkpoint, for checkpoint.load_from, from one of Hugging Face", ("folder", "checkpoint")),
        "export": ("make a Hugging Face checkpoint from one of a run", ("checkpoint", "folder")),
    }
    for name, (purpose, order) in purposes.items():
        verb = verbs.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        for argument in order:
            verb.add_argument(argument, metavar=folders[argument][0], help=folders[argument][1])
        nproc = "number of processes on this host that divide the files; default 1. The result does not depend on it"
        verb.add_argument("--nproc", type=_positive, metavar="N", help=nproc)
        if name == "import":
            skipped = "leave out a part that the model may lack, such as mtp; may be repeated"
            verb.add_argument("--skip", action="append", default=[], metavar="PART", help=skipped)
        else:
            dtype = "the dtype of the weights; default: as they are saved"
            verb.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="", help=dtype)
            adapter = "write the adapter alone, as PEFT's files; without it adapters are added to the weights"
            verb.add_argument("--adapter", action="store_true", help=adapter)
            verb.add_argument("--ema", action="store_true", help=OF_AVERAGES)
            fused = "with --adapter, one matrix for all experts of a layer, as PEFT's target_parameters has them"
            verb.add_argument("--fused-experts", action="store_true", help=fused)


def _add_uses(verbs: Any, nproc: str) -> None:
    """Add the commands that use trained models."""
    source = "a run, one of its checkpoints (step-N), or a Hugging Face checkpoint"
    purpose = "continue prompts, one on the command line, or those of a file"
    verb = _add_verb(verbs, "generate", purpose, source, nproc, '["prompt"] [options] ', of="CHECKPOINT_OR_HF")
    verb.add_argument("prompt", nargs="?", help="a text to continue")
    of_file = "a file with a prompt a line, or of JSON lines with a field `prompt`; the answers are JSON lines"
    verb.add_argument("--prompts", metavar="FILE", help=of_file)
    of_chat = "the prompt is what a user says, or each line of FILE a conversation with `messages`; a .json file is one"
    verb.add_argument("--chat", action="store_true", help=f"answer, with the tokenizer's chat template: {of_chat}")
    numbers = {
        "max-tokens": (int, 128, "tokens to add at most"),
        "temperature": (float, 0.0, "0 takes the likeliest token; others draw"),
        "top-p": (float, 1.0, "draw from the fewest likeliest tokens whose probabilities reach it"),
        "seed": (int, 0, "of what is drawn"),
        "batch-size": (int, 16, "prompts that go on together"),
    }
    for name, (kind, default, words) in numbers.items():
        verb.add_argument(f"--{name}", type=kind, default=default, help=f"{words}; default {default}")
    verb.add_argument("--ema", action="store_true", help=OF_AVERAGES)
    purpose = "loss, perplexity and bits a byte on the text of each --data.path, or on what the run has held out"
    verb = _add_verb(verbs, "evaluate", purpose, source, nproc, "[--ema] ", of="CHECKPOINT_OR_HF")
    verb.add_argument("--ema", action="store_true", help=OF_AVERAGES)
    purpose = "average the weights of checkpoints, in fp32"
    verb = verbs.add_parser("average", help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    of_ours = "checkpoints, or runs, of which the newest is meant"
    verb.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=of_ours)
    verb.add_argument("out", metavar="OUT", help="a new folder, for checkpoint.load_from and export")
    verb.add_argument("--ema", action="store_true", help="of the averages that a run keeps (optim.ema_decay)")
    purpose = "compare runs: a table of their records and of the fields in which their recipes differ"
    verb = verbs.add_parser("compare", help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    verb.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or its metrics.jsonl")
    after = "speeds and loads are of the steps after this one; default: 20, or half of a shorter run"
    verb.add_argument("--after", type=int, metavar="STEP", help=after)
    verb.add_argument("--html", metavar="FILE", help="also write a page with curves: one file, without a network")


class _ShowVersion(argparse.Action):
    """Print the version of the installed package."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # slow to import

        print(f"titan-moe {version('titan_moe')}")
        parser.exit()


def _add_verb(
    verbs: Any, name: str, purpose: str, recipe: str, nproc: str, usage: str = "", nargs: Any = None, of: str = ""
) -> argparse.ArgumentParser:
    """Add a command with the explanations of its recipe, or of the checkpoint that it is `of`, and `--nproc`, and the
    usage of its other options."""
    path = of or ("[RECIPE.toml]" if nargs else "RECIPE.toml")
    verb = verbs.add_parser(
        name,
        help=purpose,
        usage=f"titan-moe {name} {path} [--nproc N] {usage}[--section.key=value ...]",
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_argument("source" if of else "recipe", nargs=nargs, metavar=of or "RECIPE.toml", help=recipe)
    verb.add_argument("--nproc", type=_positive, metavar="N", help=nproc)
    return verb


def _gpu(text: str) -> str:
    if find_hardware(text) is None:
        known = ", ".join("-".join(gpu.words).upper() for gpu in KNOWN_DEVICES)
        raise argparse.ArgumentTypeError(f"{text} is not a known GPU; known are {known}")
    return text


def _copies(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_COPIES:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 to {MOST_COPIES}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds
