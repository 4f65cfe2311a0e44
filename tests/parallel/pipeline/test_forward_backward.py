"""A step of a pipeline is the same operations every time, and none is read by the host: a CUDA graph can hold it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import load
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from titan_moe.config.parallel import ParallelConfig
from titan_moe.config.precision import PrecisionConfig
from titan_moe.training.build import assemble

one_loss = load("distributed/test_one_loss")
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")


class Recorder(TorchDispatchMode):
    """Records operations, with the shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shapes = [tuple(x.shape) for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.operations.append((func.overloadpacket._qualified_op_name, shapes))
        return result


def record(parallel: ParallelConfig) -> list[list[tuple[str, list[Any]]]]:
    """The operations of the second and the third step."""
    fp32 = PrecisionConfig("fp32", "fp32", "fp32")
    recipe = one_loss.recipe(parallel, kernels="grouped_mm", precision=fp32)
    recipe = replace(recipe, model=replace(recipe.model, num_layers=5))
    run, steps = assemble(recipe, torch.device("cpu")), []
    for index in range(3):
        batch = one_loss.batch_of(index, 1, run.meshes)
        with Recorder() as seen:
            run.step.step.forward_backward(batch, torch.tensor(0.1))
        steps.append(seen.operations)
        run.optimizers.zero_grad()
    return steps[1:]


@pytest.mark.few("1f1b", "pairs")
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(pp=2, ep=2, dispatcher="allgather"),
        ParallelConfig(pp=2, ep=2, dispatcher="allgather", vpp=2, pp_schedule="zbv", accumulate_unsharded=True),
        ParallelConfig(
            pp=2,
            ep=2,
            dispatcher="allgather",
            vpp=2,
            pp_schedule="dualpipev",
            accumulate_unsharded=True,
            overlap="microbatch",
        ),
        ParallelConfig(
            pp=2,
            ep=2,
            dispatcher="allgather",
            vpp=2,
            pp_schedule="interleaved_1f1b",
            accumulate_unsharded=True,
            overlap="microbatch",
        ),
    ],
    ids=["1f1b", "zbv", "pairs", "interleaved_pairs"],
)
def test_steps_are_the_same_operations_without_host_reads(ranks: Any, parallel: ParallelConfig) -> None:
    for second, third in ranks(4, record, parallel):
        assert len(second) > 100 and second == third
        assert not {name for name, _ in second} & set(READS)
