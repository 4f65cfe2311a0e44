"""On a GPU, too, a resumed run goes on bit for bit, random draws included, and its checkpoint opens on a CPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_moe.checkpoint.dcp import Checkpointer
from titan_moe.config import Recipe
from titan_moe.config.train import CheckpointConfig, MetricsConfig, OptimConfig, TrainConfig
from titan_moe.metrics.environment import describe_environment
from titan_moe.metrics.meter import Meter
from titan_moe.metrics.throughput import peak_memory_gib
from titan_moe.optim.build import build_optimizer
from titan_moe.optim.schedule import build_schedule

pytestmark = pytest.mark.gpu
OPTIM = OptimConfig(lr=0.01, warmup_steps=2, decay_steps=2)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Counter:
    def __init__(self):
        self.count = 0

    def fingerprint(self):
        return "random numbers"

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Run:
    def __init__(self, folder, device, is_async):
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(256, 512), nn.Dropout(0.5), nn.LayerNorm(512), nn.Linear(512, 8)).to(
            device
        )
        self.optimizers = build_optimizer([self.model], OPTIM)
        self.schedules = build_schedule(self.optimizers, OPTIM, 8)
        self.loader, self.counter = Counter(), Counter()
        recipe = Recipe(checkpoint=CheckpointConfig(is_async=is_async), optim=OPTIM)
        states = (self.optimizers, self.schedules, self.loader, self.counter)
        self.checkpointer = Checkpointer(recipe, folder, [self.model], *states)

    def train(self, num_steps):
        losses = []
        for _ in range(num_steps):
            loss = self.model(torch.randn(64, 256, device=self.device)).square().mean()
            loss.backward()
            self.optimizers.step()
            self.schedules.step()
            self.optimizers.zero_grad()
            self.counter.count += 1
            losses.append(loss.detach())
        return torch.stack(losses)


@pytest.mark.parametrize("is_async", [False, True])
def test_exact_resume_and_a_visit_to_the_cpu(tmp_path, is_async):
    device = torch.device("cuda", 0)
    straight = Run(tmp_path, device, is_async)
    straight.train(3)
    straight.checkpointer.save(3)
    saved = {name: value.clone() for name, value in straight.model.state_dict().items()}
    expected = straight.train(5)
    straight.checkpointer.close()

    resumed = Run(tmp_path, device, is_async)
    torch.cuda.manual_seed(99)
    assert resumed.checkpointer.load() and resumed.counter.count == 3
    assert torch.equal(resumed.train(5), expected)
    resumed.checkpointer.close()

    visitor = Run(tmp_path, torch.device("cpu"), is_async)
    assert visitor.checkpointer.load()
    assert all(torch.equal(value, saved[name].cpu()) for name, value in visitor.model.state_dict().items())
    visitor.train(1)
    visitor.checkpointer.close()


def test_the_optimizer_and_the_meter_do_not_wait_for_the_device(tmp_path):
    device = torch.device("cuda", 0)
    run = Run(tmp_path, device, is_async=False)
    recipe = Recipe(metrics=MetricsConfig(every_steps=100, tensorboard=False), train=TrainConfig(steps=100))
    options = {"device": device, "num_ranks": 1, "is_main": True, "peak_memory_gib": lambda: peak_memory_gib(device)}
    meter = Meter(recipe, tmp_path, flops_per_token=1e9, **options)
    meter.start(0, 0)

    def log(step):
        loss = run.train(1)[0]
        counts = {"layers.0.moe": torch.ones(4, device=device)}
        metrics = {"loss": loss, "aux_loss": loss, "grad_norm": loss}
        return meter.log(step, metrics=metrics, tokens_per_expert=counts, num_tokens=64, lr=run.schedules.lr)

    record = log(1)
    assert record["memory_gib"] > 0 and record["expert_load"] == {"layers.0.moe": 1.0}
    if "H200" in torch.cuda.get_device_name(device):
        assert record["mfu"] == pytest.approx(record["tflops_per_gpu"] / 989)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert log(2) is None
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.checkpointer.close()


def test_environment_names_the_gpu():
    environment = describe_environment()
    assert torch.cuda.get_device_name(0) in environment["devices"]
    assert environment["nccl"].count(".") >= 1 and environment["cuda"] == torch.version.cuda
