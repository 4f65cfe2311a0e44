"""Buffers of messages between the stages of a pipeline are used again."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from support import load

from titan_moe.config.parallel import ParallelConfig
from titan_moe.parallel.pipeline.messages import Messages
from titan_moe.plan.pipeline.action import KEPT_SENDS
from titan_moe.plan.pipeline.parts import parts_of
from titan_moe.training.build import assemble

one_loss, pipelines = load("distributed/test_one_loss"), load("distributed/test_pipelines")


def count_buffers(parallel: ParallelConfig, num_microbatches: int) -> tuple[int, int]:
    """Of a step on this rank; and the most that the plan allows it, if it keeps activations in buffers alone."""
    recipe = pipelines.recipe_of(parallel)
    train = replace(recipe.train, global_batch_sequences=num_microbatches, micro_batch_sequences=1)
    recipe, buffers = replace(recipe, train=train), set()
    take = Messages._buffer

    def note(self: Messages) -> torch.Tensor:
        buffer = take(self)
        buffers.add(buffer.data_ptr())
        return buffer

    run = assemble(recipe, torch.device("cpu"))
    batch = one_loss.batch_of(0, 1, run.meshes, parallel=parallel, num_sequences=num_microbatches)
    with mock.patch.object(Messages, "_buffer", note):
        run.step(batch)
    part = parts_of(recipe, parallel.pp)[run.meshes.dense.get_local_rank("pp")]
    return len(buffers), part.num_messages + round(part.num_in_flight * parallel.vpp)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_more_microbatches_need_no_more_buffers(ranks: Any, schedule: str) -> None:
    parallel = replace(pipelines.SCHEDULES[schedule], pp=2)
    few, many = (ranks(2, count_buffers, parallel, number) for number in (8, 16))
    for (number, most), (of_many, _) in zip(few, many, strict=True):
        assert KEPT_SENDS <= number == of_many <= most < 16


def send_one_after_the_other(num_messages: int) -> tuple[bool, int]:
    """Whether all that arrived is what was sent, though its sender changes it at once; and the number of buffers."""
    rank, like = torch.distributed.get_rank(), torch.empty(1).expand(3, 4)
    messages, are_equal = Messages(torch.distributed.group.WORLD, like), True
    for number in range(num_messages):
        tensor = torch.full((4, 3), float(number)).t() + rank
        if rank == 0:
            messages.send(tensor, 1)
            tensor.fill_(-1)
        else:
            received = messages.receive(0)
            are_equal &= torch.equal(received.wait(), torch.full((3, 4), float(number)))
            messages.free(received.tensor)
    messages.finish()
    return are_equal, len(messages.idle)


def test_a_sent_tensor_may_be_changed_and_its_buffer_is_used_again(ranks: Any) -> None:
    assert ranks(2, send_one_after_the_other, 20) == [(True, KEPT_SENDS), (True, 1)]
