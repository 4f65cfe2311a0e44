"""How batches, schedules, data and records become `[train]`, `[optim]`, `[data]` and the sections behind, a row for
each value that is not simply another name."""

from collections.abc import Mapping
from typing import Any

from titan_moe.config.migrate.given import Given, NoCounterpart, Noted, Row, Unreadable
from titan_moe.config.migrate.rows_parallel import data_parallel_ranks, ranks, sizes


def global_batch(given: Given) -> int:
    """Sequences of a step."""
    stated = given.whole("train.global_batch_sequences", -1, -1)
    if stated > 0:
        return stated
    return given.whole("train.micro_batch_sequences", 1, 1) * data_parallel_ranks(given)


def num_steps(given: Given) -> int:
    """Steps of the run; 0 if they are not said."""
    if "train_samples" in given:
        return given.whole("train_samples") // global_batch(given)
    return given.whole("train.steps")


def _batch(given: Given) -> Mapping[str, Any]:
    """torchtitan cuts the sequences of a rank into microbatches of a pipeline."""
    number: Any = global_batch(given)
    if given.whole("train.global_batch_sequences", -1, -1) < 1:
        number = Noted(number, f"{data_parallel_ranks(given)} data-parallel of {ranks(given)} ranks")
    values = {"train.global_batch_sequences": number}
    if "train.micro_batch_sequences" in given:
        micro = given.whole("train.micro_batch_sequences", 1, 1)
        if given.dialect == "torchtitan" and sizes(given)["pp"] > 1:
            micro = min(given.whole("pipeline_parallel_microbatch_size", 1, 1), micro)
        values["train.micro_batch_sequences"] = micro
    return values


def _steps(given: Given) -> Mapping[str, Any]:
    if "train_samples" in given and "train.steps" in given:
        raise Unreadable(given["train_samples"], f"left out: {given['train.steps'].place} says it too")
    return {"train.steps": num_steps(given)}


DECAYS = {"cosine": "cosine", "linear": "linear", "minus_sqrt": "sqrt", "sqrt": "sqrt"}
"""Shapes of a decay -> optim.decay."""


def _warmup(given: Given) -> int:
    if "lr_warmup_samples" in given:
        return given.whole("lr_warmup_samples") // global_batch(given)
    if "lr_warmup_fraction" in given:
        share = given.number("lr_warmup_fraction")
        return int(share * given.whole("lr_decay_iters", num_steps(given)))
    return given.whole("optim.warmup_steps")


def _schedule(given: Given) -> Mapping[str, Any]:
    """Megatron's decay begins behind the warmup; that of WSD has its own length. Ours ends with the run."""
    steps, warmup = num_steps(given), _warmup(given)
    values: dict[str, Any] = {"optim.warmup_steps": warmup}
    style = given.word("lr_decay_style", "linear")
    if style == "constant":
        return values | {"optim.decay_steps": 0}
    is_wsd = style == "wsd"
    shape = given.word("lr_wsd_decay_style", "exponential") if is_wsd else style
    values["optim.decay"] = DECAYS.get(shape) or Noted("cosine", f"{shape} is not built here")
    if is_wsd:
        length = given.whole("lr_wsd_decay_iters", given.whole("lr_wsd_decay_samples") // global_batch(given))
        return values | {"optim.decay_steps": length}
    whole = steps
    if "lr_decay_samples" in given:
        whole = given.whole("lr_decay_samples") // global_batch(given)
    elif "lr_decay_iters" in given:
        whole = given.whole("lr_decay_iters")
    if not whole:
        return values
    decay = max(min(whole, steps or whole) - warmup, 0)
    is_other = steps and whole != steps
    note = f"there from {warmup} to {whole} of {steps} steps; ours ends with the run"
    return values | {"optim.decay_steps": Noted(decay, note) if is_other else decay}


def _titan_schedule(given: Given) -> Mapping[str, Any]:
    """Without a ratio the decay has all steps behind the warmup."""
    steps, warmup = num_steps(given), given.whole("optim.warmup_steps")
    length = max(steps - warmup, 0)
    if "lr_scheduler.decay_ratio" in given:
        length = min(round(given.number("lr_scheduler.decay_ratio") * steps), length)
    shape = given.word("lr_scheduler.decay_type", "linear")
    return {
        "optim.decay_steps": length,
        "optim.decay": DECAYS.get(shape) or Noted("cosine", f"{shape} is not built here"),
    }


def _min_lr(given: Given) -> Mapping[str, Any]:
    peak, lowest = given.number("optim.lr"), given.number("min_lr")
    if not peak:
        raise NoCounterpart("optim.min_lr_ratio is min_lr / lr, and lr is not said")
    if not 0 <= lowest <= peak:
        raise Unreadable(given["min_lr"], f"at least 0 and at most {given['optim.lr'].place} = {peak}")
    return {"optim.min_lr_ratio": float(f"{lowest / peak:.12g}")}


def _titan_min_lr(given: Given) -> Mapping[str, Any]:
    return {"optim.min_lr_ratio": given.number("lr_scheduler.min_lr_factor")}


def _betas(given: Given) -> Mapping[str, Any]:
    words = given.words("betas", given.words("adam_betas"))
    try:
        first, second = (float(word.strip("()[]")) for word in words)
    except ValueError as error:
        raise Unreadable(given["betas" if "betas" in given else "adam_betas"], "two numbers") from error
    return {"optim.beta1": first, "optim.beta2": second}


def _qk_clip(given: Given) -> Mapping[str, Any]:
    """Megatron's threshold counts with the flag alone."""
    if not given.flag("qk_clip"):
        return {}
    threshold, alpha = given.number("qk_clip_threshold", 100.0), given.number("qk_clip_alpha", 0.5)
    return {"optim.qk_clip.threshold": threshold, "optim.qk_clip.alpha": alpha}


def _timeout(given: Given) -> Mapping[str, Any]:
    return {"run.step_timeout_minutes": given.number("comm.train_timeout_seconds") / 60}


# Data.


def _token_files(prefix: str) -> str:
    return prefix if prefix.endswith((".bin", ".npy")) else f"{prefix}.bin"


def _weighted(words: tuple[str, ...], given: Given) -> list[dict[str, Any]]:
    """Megatron's blend: a weight before each path, or paths alone."""
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return [{"path": _token_files(path), "weight": 1.0} for path in words]
    if len(words) % 2:
        raise Unreadable(given["data_path"], "a weight before each path")
    return [{"path": _token_files(path), "weight": weight} for path, weight in zip(words[1::2], weights, strict=True)]


def _data(given: Given) -> Mapping[str, Any]:
    paths = given.words("data_path", given.words("train_data_path"))
    if given.flag("mock_data") or not paths:
        return {"data.source": "synthetic"}
    values: dict[str, Any] = {"data.source": "tokens", "data.path": _token_files(paths[0]), "data.tokenizer": ""}
    if len(paths) > 1:
        values = {"data.source": "mixture", "data.mixture": _weighted(paths, given), "data.tokenizer": ""}
    if given.word("tokenizer_type", "").startswith("huggingface") and "tokenizer_model" in given:
        values["data.tokenizer"] = str(given.raw("tokenizer_model"))
    if len(paths) == 1 and (share := _held_out(given)):
        values["data.holdout_fraction"] = share
    return values


def _held_out(given: Given) -> float:
    """The share of validation in Megatron's split, such as 969,30,1."""
    try:
        shares = [float(word) for word in given.words("split", ("969", "30", "1"))]
    except ValueError as error:
        raise Unreadable(given["split"], "numbers such as 969,30,1") from error
    total = sum(shares)
    if not 0 < total < 1e12 or min(shares) < 0:
        raise Unreadable(given["split"], "numbers such as 969,30,1")
    return round(shares[1] / total, 6) if len(shares) > 1 else 0.0


def _tokenizer(given: Given) -> Mapping[str, Any]:
    if "data_path" in given and given.word("tokenizer_type", "").startswith("huggingface"):
        return {}
    if "data_path" not in given:
        raise NoCounterpart("synthetic data has no tokenizer; for text set data.tokenizer to a folder of Hugging Face")
    raise NoCounterpart("data.tokenizer takes a folder with a tokenizer.json of Hugging Face")


TITAN_DATASETS: Mapping[str, Mapping[str, Any]] = {
    "c4": {"data.path": "allenai/c4", "data.subset": "en"},
    "c4_test": {"data.path": "allenai/c4", "data.subset": "en"},
}
"""torchtitan's names of data sets -> ours of the hub."""


def _titan_data(given: Given) -> Mapping[str, Any]:
    name = str(given.raw("training.dataset", "c4_test"))
    if name not in TITAN_DATASETS:
        raise NoCounterpart("data.path takes files or a name of the hub; without it data is synthetic")
    values: dict[str, Any] = {"data.source": "auto", **TITAN_DATASETS[name], "data.is_streamed": True}
    if "training.dataset_path" in given:
        values = {"data.source": "auto", "data.path": str(given.raw("training.dataset_path"))}
    elif name.endswith("_test"):
        raise NoCounterpart("a file of torchtitan's tests; data is synthetic until data.path names yours")
    if tokenizer := given.raw("model.hf_assets_path", given.raw("model.tokenizer_path")):
        values["data.tokenizer"] = str(tokenizer)
    return values


def _titan_tokenizer(given: Given) -> Mapping[str, Any]:
    if str(given.raw("training.dataset", "c4_test")).endswith("_test") and "training.dataset_path" not in given:
        raise NoCounterpart("synthetic data has no tokenizer; for text set data.tokenizer")
    return {}


def _validation(given: Given) -> Mapping[str, Any]:
    rounds = given.whole("eval_iters", 100)
    if not rounds or "eval_interval" not in given:
        return {"validation.every_steps": 0}
    paths = given.words("data_path", given.words("train_data_path"))
    if paths and not (len(paths) == 1 and _held_out(given)):
        raise NoCounterpart("set validation.path, or data.holdout_fraction; nothing is held out of this data")
    return {
        "validation.every_steps": given.whole("eval_interval"),
        "validation.num_sequences": rounds * global_batch(given),
    }


def _titan_validation(given: Given) -> Mapping[str, Any]:
    if not given.flag("validation.enable"):
        return {}
    rounds = given.whole("validation.steps", -1, -1)
    size = given.whole("validation.local_batch_size", 8, 1) * data_parallel_ranks(given)
    number = {"validation.num_sequences": rounds * size} if rounds > 0 else {}
    return {"validation.every_steps": given.whole("validation.freq", 10, 1), **number}


def _load(given: Given) -> Mapping[str, Any]:
    """A run goes on from its own folder; other checkpoints have another format."""
    if given.raw("load") == given.raw("save"):
        return {}
    raise NoCounterpart(
        'its checkpoints are not read here: export them as Hugging Face\'s, then checkpoint.load_from = "hf:FOLDER"'
    )


def _save(given: Given) -> Mapping[str, Any]:
    return {"run.folder": str(given.raw("save"))}


def _titan_save(given: Given) -> Mapping[str, Any]:
    return {"checkpoint.every_steps": given.whole("checkpoint.interval", 500) if given.flag("checkpoint.enable") else 0}


def _titan_load(given: Given) -> Mapping[str, Any]:
    if "checkpoint.initial_load_path" not in given:
        return {}
    if not given.flag("checkpoint.initial_load_in_hf"):
        raise NoCounterpart(
            'its DCP checkpoints are not read here; export Hugging Face\'s, and load_from = "hf:FOLDER"'
        )
    return {"checkpoint.load_from": f"hf:{given.raw('checkpoint.initial_load_path')}"}


def _is_async(given: Given) -> Mapping[str, Any]:
    return {"checkpoint.is_async": given.word("async_mode") != "disabled"}


def _wandb(given: Given) -> Mapping[str, Any]:
    name = given.raw("wandb_exp_name")
    project = str(given.raw("wandb_project", ""))
    return ({"metrics.wandb": True, "metrics.wandb_project": project} if project else {}) | (
        {"metrics.wandb_name": str(name)} if name else {}
    )


def _tensorboard(given: Given) -> Mapping[str, Any]:
    return {"metrics.tensorboard": bool(given.raw("tensorboard_dir"))}


def _profile(given: Given) -> Mapping[str, Any]:
    if given.flag("profiling.enable_profiling", given.flag("profile")):
        start = given.whole("profile_step_start", given.whole("profiling.profile_freq", 10, 1))
        end = given.whole("profile_step_end", start + given.whole("profiler_active", 2))
        return {"profile.start_step": start, "profile.num_steps": max(end - start, 1)}
    return {}


ROWS = (
    Row("train.global_batch_sequences train.micro_batch_sequences pipeline_parallel_microbatch_size", _batch),
    Row("train.steps train_samples", _steps),
    Row(
        "lr_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples "
        "lr_warmup_iters lr_warmup_samples lr_warmup_fraction",
        _schedule,
    ),
    Row("lr_scheduler.decay_type lr_scheduler.decay_ratio", _titan_schedule),
    Row("min_lr", _min_lr),
    Row("lr_scheduler.min_lr_factor", _titan_min_lr),
    Row("betas adam_betas", _betas),
    Row("qk_clip qk_clip_threshold qk_clip_alpha", _qk_clip),
    Row("comm.train_timeout_seconds", _timeout),
    Row("data_path train_data_path mock_data split", _data),
    Row("tokenizer_type tokenizer_model", _tokenizer),
    Row("training.dataset training.dataset_path", _titan_data),
    Row("model.hf_assets_path model.tokenizer_path", _titan_tokenizer),
    Row("eval_iters eval_interval", _validation),
    Row("validation.enable validation.freq validation.steps validation.local_batch_size", _titan_validation),
    Row("save", _save),
    Row("load", _load),
    Row("checkpoint.enable checkpoint.interval", _titan_save),
    Row("checkpoint.initial_load_path checkpoint.initial_load_in_hf", _titan_load),
    Row("async_mode", _is_async),
    Row("wandb_project wandb_exp_name", _wandb),
    Row("tensorboard_dir", _tensorboard),
    Row(
        "profiling.enable_profiling profiling.profile_freq profiler_active profile profile_step_start profile_step_end",
        _profile,
    ),
)
