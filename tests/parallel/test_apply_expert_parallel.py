"""`apply_expert_parallel` on a model of one's own: ranks compute what one process computes."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from titan_moe import ModelConfig, MoE, MoEConfig, apply_expert_parallel, scale_balancing_losses
from titan_moe.config.kernels import Kernels
from titan_moe.dispatch.capacity import ExpertCapacity
from titan_moe.dispatch.local import LocalDispatcher
from titan_moe.parameters import local

README = Path(__file__).parents[2] / "titan_moe" / "layers" / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
(SNIPPET,) = (code for code in SNIPPETS if "WORLD" in code and "DDP" not in code)
(OF_FSDP2,), (OF_DDP,) = ([code for code in SNIPPETS if word in code] for word in ("fully_shard", "DDP("))
STEPS = {"FSDP2": OF_FSDP2, "DDP": OF_DDP}
SEQUENCES, TOKENS, WIDTH = 4, 6, 16


class Block(nn.Module):
    """As README's."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        moe = MoEConfig(
            num_experts=num_experts, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=8, aux_loss_coef=0.1
        )
        self.norm = nn.RMSNorm(WIDTH)
        self.moe = MoE(ModelConfig(hidden_size=WIDTH, moe=moe), kernels=Kernels(experts="reference"))

    def forward(self, x_BND: Tensor) -> Tensor:
        return x_BND + self.moe(self.norm(x_BND))


def built(num_experts: int = 4) -> Block:
    torch.manual_seed(0)
    block = Block(num_experts).double()
    for weight in block.moe.parameters():
        nn.init.normal_(weight, std=0.3)
    return block


def run(block: Block, reduction: str = "mean") -> dict[str, Tensor]:
    """Outputs and gradients of this rank's share of the sequences; the loss and gradients are means, or sums."""
    scale_balancing_losses(block, reduction=reduction)
    x_BND = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y_BND = block(x_BND.chunk(dist.get_world_size())[dist.get_rank()])
    getattr(y_BND.square().sum(-1), reduction)().backward()
    grads = {name: weight.grad for name, weight in block.named_parameters()}
    whole = {name: grad.full_tensor() for name, grad in grads.items() if isinstance(grad, DTensor)}
    for name in grads.keys() - whole.keys():
        dist.all_reduce(grads[name])
        grads[name] /= dist.get_world_size() if reduction == "mean" else 1
    return {"y": y_BND.detach(), **grads, **whole}


def by_readme(block: Block) -> None:
    exec(SNIPPET, {"block": block})


def over_a_mesh(block: Block) -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("edp", "ep"))
    apply_expert_parallel(block.moe, mesh["ep"], "allgather", capacity=ExpertCapacity(8.0))


def summed(block: Block) -> None:
    apply_expert_parallel(block, dist.group.WORLD, gradients="sum")


WAYS = {"README": by_readme, "a mesh": over_a_mesh, "summed": summed}
REDUCTIONS = {"README": "mean", "a mesh": "mean", "summed": "sum"}


def run_spread(way: str) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    """The result of `run`, and the shapes of this rank's expert weights."""
    block = built()
    WAYS[way](block)
    return run(block, REDUCTIONS[way]), [tuple(weight.to_local().shape) for weight in block.moe.experts.parameters()]


def run_alone(way: str) -> dict[str, Tensor]:
    return run(built(), REDUCTIONS[way])


@pytest.mark.parametrize("way", WAYS)
def test_apply_expert_parallel_on_two_ranks_equals_one(ranks, way: str) -> None:
    (expected,) = ranks(1, run_alone, way)
    spread = ranks(2, run_spread, way)
    torch.testing.assert_close(torch.cat([result["y"] for result, _ in spread]), expected.pop("y"))
    for result, shapes in spread:
        assert shapes == [(2, 2, 8, WIDTH), (2, WIDTH, 8)], "half of the experts"
        del result["y"]
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def step(way: str, folder: str = "") -> dict[str, Tensor]:
    """Weights and clipped gradients after a step of README's: with FSDP2 or DDP over all ranks, or on one.

    The model and the optimizer's state are saved in the folder.
    """
    block, (_, alone) = built(), STEPS["FSDP2"].split("ignored_params=set(block.moe.experts.parameters()))\n")
    x_BND = 30 * torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x_BND = x_BND.chunk(dist.get_world_size())[dist.get_rank()]
    names = {"block": block, "x_BND": x_BND, "torch": torch, "dist": dist}
    names |= {"apply_expert_parallel": apply_expert_parallel}
    exec((alone if way == "alone" else STEPS[way]).replace('"cuda"', '"cpu"'), names)
    tensors = {name: weight.detach() for name, weight in block.named_parameters()}
    tensors |= {f"{name}.grad": weight.grad for name, weight in block.named_parameters()}
    if folder:
        dcp.save(states_of(block, names["optimizer"]), checkpoint_id=folder)
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}


def states_of(block: Block, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, moments = get_state_dict(block, optimizer)
    return {"model": model, "optimizer": moments}


@pytest.mark.parametrize("way", STEPS)
def test_a_step_over_ranks_equals_that_of_one_process(ranks, way: str) -> None:
    (expected,) = ranks(1, step, "alone")
    norm = sum(grad.square().sum() for name, grad in expected.items() if name.endswith(".grad")).sqrt()
    torch.testing.assert_close(norm, torch.ones_like(norm), rtol=1e-5, atol=0, msg="gradients are clipped")
    for result in ranks(2, step, way):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def loaded(folder: str) -> dict[str, Any]:
    """The states of a block on one process after a step of its own with other weights, loaded from the folder."""
    block = built()
    optimizer = torch.optim.AdamW(block.parameters())
    block(torch.randn(1, TOKENS, WIDTH, dtype=torch.float64)).sum().backward()
    optimizer.step()
    states = states_of(block, optimizer)
    dcp.load(states, checkpoint_id=folder)
    return states


def test_checkpoint_of_a_sharded_step_loads_on_one_process(ranks, tmp_path: Path) -> None:
    (expected,) = ranks(1, step, "alone", str(tmp_path / "alone"))
    ranks(2, step, "FSDP2", str(tmp_path / "sharded"))
    (of_one,), (states,) = (ranks(1, loaded, str(tmp_path / name)) for name in ("alone", "sharded"))
    moments = states["optimizer"]["state"]
    assert states["optimizer"]["param_groups"] == of_one["optimizer"]["param_groups"]
    torch.testing.assert_close(moments, of_one["optimizer"]["state"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states["model"], of_one["model"], rtol=1e-12, atol=1e-12)
    weights = {name: states["model"][name] for name in moments}
    torch.testing.assert_close(weights, {name: expected[name] for name in moments}, rtol=1e-12, atol=1e-12)
    means = {name: moment["exp_avg"] for name, moment in moments.items()}
    gradients = {name.removesuffix(".grad"): grad for name, grad in expected.items() if name.endswith(".grad")}
    torch.testing.assert_close(means, {name: 0.1 * grad for name, grad in gradients.items()}, rtol=1e-12, atol=1e-12)


def run_copied() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results of a sharded block, and of its copy."""
    block = built()
    by_readme(block)
    copied = copy.deepcopy(block)
    for weight, other in zip(block.parameters(), copied.parameters(), strict=True):
        assert local(weight).data_ptr() != local(other).data_ptr()
    return run(block), run(copied)


def test_a_block_over_ranks_is_copied_as_for_averaged_weights(ranks) -> None:
    for results, of_copy in ranks(2, run_copied):
        torch.testing.assert_close(of_copy, results, rtol=0, atol=0)


def world() -> Any:
    return dist.group.WORLD


def two_axes() -> Any:
    return init_device_mesh("cpu", (1, dist.get_world_size()))


def on_meta(num_experts: int) -> Block:
    with torch.device("meta"):
        return Block(num_experts)


def sharded(num_experts: int) -> Block:
    block = built(num_experts)
    apply_expert_parallel(block, world())
    return block


class Ours(LocalDispatcher):
    """A dispatcher of one's own."""


def dispatching(num_experts: int) -> Block:
    block = built(num_experts)
    block.moe.dispatcher = Ours(num_experts)
    return block


def dense(num_experts: int) -> nn.Module:
    return nn.Linear(num_experts, 1)


# (the model, its experts, the ranks, options) -> what is wrong
BROKEN: dict[str, tuple[Callable[[int], nn.Module], int, Callable[[], Any], dict[str, Any], str]] = {
    "an odd number": (built, 3, world, {}, "3 experts do not divide by 2 ranks; take a divisor of 3"),
    "an unknown name": (built, 4, world, {"dispatcher": "pigeon"}, '"pigeon" is not in the table; take "local"'),
    "nothing moves": (
        built,
        4,
        world,
        {"dispatcher": "local"},
        'there are 2 ranks; take "allgather", "alltoall", "symm',
    ),
    "no memory": (built, 4, world, {"dispatcher": "symm_mem"}, "give it memory = open_symm_memory("),
    "no GPU": (built, 4, world, {"dispatcher": "symm_mem"}, 'experts are on cpu; take "allgather" or "alltoall"\n'),
    "no nodes": (built, 4, world, {"dispatcher": "hierarchical"}, '= 2 of 2 ranks; take dispatcher = "alltoall"'),
    "no group": (built, 4, lambda: None, {}, "ranks = None is neither a DeviceMesh nor a process group; call torch"),
    "no bound": (built, 4, world, {"capacity": ExpertCapacity(2.0)}, 'take "allgather", "symm_mem" or'),
    "two axes": (built, 4, two_axes, {}, "the mesh has 2 axes"),
    "no device": (on_meta, 4, world, {}, "has no device, and the experts are on meta; give a DeviceMesh"),
    "no experts": (dense, 4, world, {}, "the model has no titan_moe.MoE layer"),
    "an own one": (dispatching, 4, world, {}, '"alltoall" would replace Ours in moe.dispatcher; set your own after'),
    "no reduction": (built, 4, world, {"gradients": "max"}, 'gradients = "max" is neither "mean" nor "sum"'),
    "twice": (sharded, 4, world, {}, "the experts are sharded already"),
}


def refuse(case: str) -> str:
    model, num_experts, over, options, _ = BROKEN[case]
    with pytest.raises(ValueError) as refusal:
        apply_expert_parallel(model(num_experts), over(), **options)
    return str(refusal.value)


@pytest.mark.parametrize("case", BROKEN)
def test_apply_expert_parallel_refuses_with_a_way_out(ranks, case: str) -> None:
    for words in ranks(2, refuse, case):
        assert BROKEN[case][-1] in words, words
