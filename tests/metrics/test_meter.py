"""The meter: device reads only at logged steps, complete records, continuation after a resume."""

import io
import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from titan_moe.config import Recipe
from titan_moe.config.model import ModelConfig, MoEConfig
from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.perf import CompileConfig
from titan_moe.config.schema import Table
from titan_moe.config.train import MetricsConfig, TrainConfig, ValidationConfig
from titan_moe.metrics.load_image import CELL_PIXELS, LEFT, TOP, WHITE_LOAD
from titan_moe.metrics.meter import Meter

FIELDS = {
    "step", "loss", "aux_loss", "grad_norm", "lr", "tokens_seen", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu",
    "memory_gib", "step_ms", "expert_load", "idle_experts", "skipped_steps", "rerun_steps", "rerun_share",
}  # fmt: skip
COUNTS = {"layers.1.moe": torch.tensor([1, 3]), "layers.2.moe": torch.tensor([2, 2])}


def build(
    folder,
    every_steps=4,
    total_steps=10,
    is_main=True,
    tensorboard=False,
    load="none",
    ep=1,
    cudagraph="off",
    **sections,
):
    recipe = Recipe(
        model=ModelConfig(moe=MoEConfig(num_experts=8, top_k=2)),
        parallel=ParallelConfig(ep=ep),
        compile=CompileConfig(cudagraph=cudagraph),
        metrics=MetricsConfig(every_steps=every_steps, tensorboard=tensorboard),
        train=TrainConfig(steps=total_steps, forced_load=load),
        **sections,
    )
    device = torch.device("cpu")
    options = {"flops_per_token": 1e6, "device": device, "num_ranks": 2, "is_main": is_main}
    return Meter(recipe, folder, **options, peak_memory_gib=lambda: 1.5)


def log(meter, step, counts=COUNTS, **of_device):
    metrics = {"loss": torch.tensor(2.0 + step), "aux_loss": torch.tensor(0.0), "grad_norm": torch.tensor(0.5)}
    metrics |= {"skipped_steps": torch.tensor(2), "skipped_in_row": torch.tensor(1), **of_device}
    known = {"lr": 1e-3, "rerun_steps": 1, "rerun_share": 0.1, "graph_recordings": 3, "expert_clones": 2}
    return meter.log(step, metrics=metrics, tokens_per_expert=counts, num_tokens=64, **known)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_meter_records(tmp_path, capsys):
    meter = build(tmp_path)
    meter.start(0, 0)
    returned = [log(meter, step) for step in range(1, 11)]
    meter.close()
    assert [record["step"] for record in returned if record] == [1, 4, 8, 10]
    assert [record for record in returned if record] == records(tmp_path)
    last = returned[-1]
    assert last.keys() == FIELDS and last["memory_gib"] == 1.5
    assert (last["loss"], last["grad_norm"], last["lr"], last["tokens_seen"]) == (12.0, 0.5, 1e-3, 640)
    assert (last["skipped_steps"], last["rerun_steps"]) == (2, 1)
    assert type(last["skipped_steps"]) is int and last["rerun_share"] == 0.1
    assert last["expert_load"] == {"layers.1.moe": 1.5, "layers.2.moe": 1.0}
    assert last["idle_experts"] == {"sum": 0, "max": 0}
    assert last["tokens_per_second_per_gpu"] == pytest.approx(64 / last["step_ms"] * 1e3 / 2)
    assert last["tflops_per_gpu"] == pytest.approx(last["tokens_per_second_per_gpu"] * 1e-6)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_meter_reads_nothing_between_logged_steps(tmp_path):
    meter = build(tmp_path)
    meter.start(0, 0)
    log(meter, 1)
    unreadable = {name: torch.empty((), device="meta") for name in ("loss", "grad_norm", "skipped_steps")}
    counts = {"layers.1.moe": torch.empty(4, device="meta")}
    for step in (2, 3):
        assert log(meter, step, counts, **unreadable) is None
    with pytest.raises((RuntimeError, NotImplementedError)):
        log(meter, 4, counts, **unreadable)


def test_meter_resume_continues_the_file(tmp_path):
    meter = build(tmp_path)
    meter.start(0, 0)
    for step in range(1, 9):
        log(meter, step)
    meter.log_validation(4, torch.tensor(1.5))
    meter.log_validation(8, torch.tensor(1.25))
    meter.close()
    resumed = build(tmp_path)
    resumed.start(5, 320)
    for step in range(6, 11):
        log(resumed, step)
    resumed.log_validation(10, 1.0)
    resumed.close()
    found = records(tmp_path)
    assert [(r["step"], "validation_loss" in r) for r in found] == [
        (1, False), (4, False), (4, True), (6, False), (8, False), (10, False), (10, True)
    ]  # fmt: skip
    assert found[3]["tokens_seen"] == 384 and found[2] == {"step": 4, "validation_loss": 1.5}


def test_meter_writes_the_losses_of_sets(tmp_path, capsys):
    meter = build(tmp_path, validation=ValidationConfig(sets=Table(code="a", web="b")))
    meter.start(0, 0)
    assert meter.log_validation(4, torch.tensor(1.5), {"code": torch.tensor(1.0), "web": 2.0})["validation_loss"] == 1.5
    assert records(tmp_path)[-1] == {
        "step": 4, "validation_loss": 1.5, "validation_loss/code": 1.0, "validation_loss/web": 2.0
    }  # fmt: skip
    assert "validation loss 1.5000  code 1.0000  web 2.0000" in capsys.readouterr().out


def test_meter_other_ranks_write_nothing(tmp_path, capsys):
    meter = build(tmp_path / "run", is_main=False, tensorboard=True)
    meter.start(0, 0)
    assert log(meter, 1)["loss"] == 3.0
    meter.close()
    assert not (tmp_path / "run").exists() and capsys.readouterr().out == ""


def test_meter_records_the_loads_of_ranks(tmp_path, capsys):
    meter = build(tmp_path, ep=2)
    meter.start(0, 0)
    record = log(meter, 1, {"a": torch.tensor([4, 0, 0, 2]), "b": torch.tensor([0, 0, 0, 6])})
    assert record["idle_experts"] == {"sum": 5, "max": 3}
    assert record["overload"] == pytest.approx({"avg": (4 / 3 + 2) / 2, "max": 2.0, "cum": 8 / 6})
    assert record["busiest_rank"] == 1
    assert "5 idle experts  overload 2.00" in capsys.readouterr().out


@pytest.mark.parametrize("clones", ["off", "auto"])
def test_meter_records_the_replica_slots_in_use(tmp_path, clones):
    meter = build(tmp_path, ep=2)
    meter.recipe = replace(meter.recipe, parallel=ParallelConfig(ep=2, expert_clones=clones))
    meter.start(0, 0)
    assert log(meter, 1).get("expert_clones") == (2 if clones == "auto" else None)


def test_meter_of_a_dense_model(tmp_path, caplog):
    caplog.set_level(logging.INFO, "titan_moe")
    meter = build(tmp_path, ep=2)
    meter.start(0, 0)
    record = log(meter, 1, {})
    assert record["expert_load"] == record["idle_experts"] == {} and "overload" not in record
    assert not caplog.messages


def test_meter_describes_the_routing_of_a_new_run_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "titan_moe")
    meter = build(tmp_path, every_steps=1)
    meter.start(0, 0)
    for step in (1, 2):
        log(meter, step)
    assert caplog.messages == [
        "routing at the start: busiest expert 1.50 times the mean (layers.1.moe); 0 of 4 experts idle"
    ]
    resumed = build(tmp_path, every_steps=1)
    resumed.start(2, 128)
    log(resumed, 3)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("load", ["none", "collapsed"])
def test_meter_warns_of_a_collapse(tmp_path, caplog, load):
    meter = build(tmp_path, every_steps=1, load=load)
    meter.start(0, 0)
    for step in range(1, 8):
        log(meter, step, {"layers.1.moe": torch.tensor([8, 8, 0, 0, 0, 0, 0, 0])})
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1


def test_meter_draws_loads_now_and_then(tmp_path):
    meter = build(tmp_path, every_steps=1, total_steps=21, tensorboard=True)
    meter.start(0, 0)
    for step in range(1, 22):
        log(meter, step)
    meter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    images = events.Images("moe/loads")
    assert [image.step for image in images] == [1, 11, 21]
    pixels = np.array(Image.open(io.BytesIO(images[0].encoded_image_string)).convert("L"))
    end = 2 * CELL_PIXELS
    cells = pixels[TOP : TOP + end : CELL_PIXELS, LEFT : LEFT + end : CELL_PIXELS] * WHITE_LOAD / 255
    assert cells == pytest.approx(np.array([[0.5, 1.5], [1.0, 1.0]]), abs=0.01)


def test_meter_records_a_forced_load(tmp_path, capsys):
    meter = build(tmp_path, load="balanced")
    meter.start(0, 0)
    assert log(meter, 1)["forced_load"] == "balanced"
    assert "FORCED LOAD: BALANCED" in capsys.readouterr().out


def test_meter_records_the_recordings_of_graphs(tmp_path):
    meter = build(tmp_path, cudagraph="step")
    meter.start(0, 0)
    assert log(meter, 1)["graph_recordings"] == 3


def test_meter_writes_tensorboard_scalars(tmp_path):
    meter = build(tmp_path, tensorboard=True)
    meter.start(0, 0)
    for step in range(1, 5):
        log(meter, step)
    meter.log_validation(4, 1.5)
    meter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = sorted(events.Tags()["scalars"])
    assert tags[0] == "loss" and tags[-1] == "validation_loss", "sections are sorted"
    assert {tag.rpartition("/")[2] for tag in tags} == FIELDS - {"step", "mfu", "expert_load", "idle_experts"} | {
        "validation_loss", "sum", "max", "layers.1.moe", "layers.2.moe"
    }  # fmt: skip
    of_experts = {tag for tag in tags if tag.startswith("moe/")}
    assert of_experts == {
        "moe/aux_loss", "moe/idle_experts/sum", "moe/idle_experts/max", "moe/expert_load/layers.1.moe",
        "moe/expert_load/layers.2.moe",
    }  # fmt: skip
    start = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = HParamsPluginData.FromString(start).session_start_info.hparams
    assert settings["optim.lr"].number_value == 3e-4 and settings["optim.kind"].string_value == "adamw"
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (4, 6.0)]


def test_meter_tensorboard_of_a_resumed_run_has_no_step_twice(tmp_path):
    for start, stop in ((0, 2), (0, 6), (3, 8)):
        meter = build(tmp_path, every_steps=1, tensorboard=True)
        meter.start(start, 64 * start)
        for step in range(start + 1, stop + 1):
            log(meter, step)
        meter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
