"""Run many exchanges of a dispatcher while messages go between pipeline stages, and check all that arrives.

    torchrun --nproc-per-node 4 tools/stress_exchanges.py --dispatcher symm_mem --pp 2 --exchanges 10000 --out out.json

The ranks are `pp` stages of ep groups. An exchange is dispatch, stub experts and combine in forward, and later
backward: as in a pipeline, `--in-flight` of them have run forward and wait for their backward. Beside each, activations
go to the next stage and gradients to the one before, as in a step. Routings are random, skewed, and to one rank alone.
Results and gradients are compared with those of a dense computation, and messages with what their sender drew: all on
the device, which the host reads every `--every` exchanges. A rank that is not done with those after `--patience`
seconds prints its stacks and ends the run with exit code 1: a hang.
"""

import argparse
import faulthandler
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from dispatch_candidates import DISPATCHERS, Case, build_dispatcher, expert_factors, own_factors, stub_experts
from measurement import facts_of
from rank_processes import reporting_errors, write_once
from torch import Tensor

from titan_moe.config.parallel import ParallelConfig, resolve
from titan_moe.config.train import RunConfig
from titan_moe.parallel.mesh import build_meshes
from titan_moe.parallel.pipeline.messages import Messages, Received
from titan_moe.run.process import process_group

CASE = Case(tokens=2048, width=2048, hidden=768, experts=128, choices=8)
SMOKE = Case(tokens=64, width=16, hidden=8, experts=8, choices=2, kernels="grouped_mm")
NUM_SAMPLES = 6
"""Different inputs; exchanges take them in turn."""
TOLERANCE = 1e-5


class Sample(NamedTuple):
    """The inputs of an exchange, and what comes out."""

    x_TD: Tensor
    ids_TK: Tensor
    scores_TK: Tensor
    grad_TD: Tensor
    results: list[Tensor]
    """Of the exchange, and the gradients of rows and scores."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatcher", choices=DISPATCHERS, default="symm_mem")
    parser.add_argument("--pp", type=int, default=2, help="stages; the other ranks are ep groups")
    parser.add_argument("--exchanges", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=2, help="exchanges between forward and backward")
    parser.add_argument("--every", type=int, default=100, help="exchanges between reads of the host")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for these, the first ones too")
    parser.add_argument("--tokens", type=int, help=f"of a rank; default {CASE.tokens:,}")
    help_ = "as run.ranks_per_gpu: to try it on fewer GPUs, under NVIDIA's Multi-Process Service"
    parser.add_argument("--ranks-per-gpu", type=int, default=1, help=help_)
    parser.add_argument("--smoke", action="store_true", help="a tiny case on CPUs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    case = SMOKE if args.smoke else CASE
    case = replace(case, tokens=args.tokens or case.tokens)
    run = RunConfig(device="cpu" if args.smoke else "cuda", ranks_per_gpu=args.ranks_per_gpu)
    with reporting_errors(args.out), process_group(run) as device:
        result = stress(case, device, args)
        if dist.get_rank() == 0:
            write_once(args.out, result)
            print(json.dumps(result), flush=True)


def stress(case: Case, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Run and check the exchanges. Every rank returns the worst of all ranks.

    Raises: ValueError for results that differ.
    """
    exchanges = Exchanges(args.dispatcher, case, device, args.pp)
    start, waiting = time.perf_counter(), deque[tuple[Sample, Tensor, list[Tensor]]]()
    for number in range(args.exchanges):
        if number % args.every == 0:
            faulthandler.dump_traceback_later(args.patience, exit=True)
        received = exchanges.send_messages(number)
        waiting.append(exchanges.forward(number))
        if len(waiting) > args.in_flight:
            exchanges.backward(*waiting.popleft())
        exchanges.check_messages(number, received)
        if (number + 1) % args.every == 0 or number + 1 == args.exchanges:
            exchanges.read(number + 1)
    while waiting:
        exchanges.backward(*waiting.popleft())
    worst, num_wrong = exchanges.read(args.exchanges)
    faulthandler.cancel_dump_traceback_later()
    return {
        "dispatcher": args.dispatcher,
        "exchanges": args.exchanges,
        "num_ranks": dist.get_world_size(),
        "pp": args.pp,
        "seconds": time.perf_counter() - start,
        "worst_error": worst,
        "wrong_messages": num_wrong,
    } | facts_of(device)


class Exchanges:
    """The dispatcher, the pipeline's messages and the samples of this rank."""

    def __init__(self, name: str, case: Case, device: torch.device, pp: int) -> None:
        num_ranks = dist.get_world_size()
        ep = num_ranks // pp
        meshes = build_meshes(resolve(ParallelConfig(pp=pp, ep=ep), num_ranks), device)
        self.pipeline, self.stage, self.pp = meshes.pipeline_group, meshes.dense.get_local_rank("pp"), pp
        self.rank, ep_rank = dist.get_rank(), meshes.ep.get_local_rank()
        self.dispatcher = build_dispatcher(name, case, device, torch.float32, meshes.ep.get_group())
        self.factors_e = own_factors(case, device, ep_rank, ep)
        self.samples = [draw(case, device, self.rank, number, ep) for number in range(NUM_SAMPLES)]
        self.sent = {
            stage: [draw_message(case, device, self.rank + (stage - self.stage) * ep, n) for n in range(NUM_SAMPLES)]
            for stage in (self.stage - 1, self.stage, self.stage + 1)
            if 0 <= stage < pp
        }
        self.worst, self.num_wrong = torch.zeros((), device=device), torch.zeros((), device=device)
        self.messages = Messages(self.pipeline, self.samples[0].x_TD)

    def send_messages(self, number: int) -> dict[int, Received]:
        """Post the messages of an exchange, in one order on both ranks; returns those that arrive, by their stage."""
        own, received = self.sent[self.stage][number % NUM_SAMPLES], {}
        if self.stage > 0:
            received[self.stage - 1] = self.messages.receive(self.stage - 1)
            self.messages.send(own, self.stage - 1)
        if self.stage + 1 < self.pp:
            self.messages.send(own, self.stage + 1)
            received[self.stage + 1] = self.messages.receive(self.stage + 1)
        return received

    def check_messages(self, number: int, received: dict[int, Received]) -> None:
        """Count the messages that are not what their stage has sent."""
        for stage, message in received.items():
            self.num_wrong += (message.wait() != self.sent[stage][number % NUM_SAMPLES]).any()
            self.messages.free(message.tensor)
        self.messages.finish()

    def forward(self, number: int) -> tuple[Sample, Tensor, list[Tensor]]:
        """Dispatch, stub experts, combine."""
        sample = self.samples[number % NUM_SAMPLES]
        inputs = [sample.x_TD.detach().requires_grad_(), sample.scores_TK.detach().requires_grad_()]
        routed = self.dispatcher.dispatch(inputs[0], sample.ids_TK, inputs[1])
        return sample, self.dispatcher.combine(stub_experts(routed, self.factors_e), routed), inputs

    def backward(self, sample: Sample, y_TD: Tensor, inputs: list[Tensor]) -> None:
        """Backward, and the largest error so far."""
        found = [y_TD.detach(), *torch.autograd.grad(y_TD, inputs, sample.grad_TD)]
        for actual, expected in zip(found, sample.results, strict=True):
            error = ((actual - expected).norm() / expected.norm()).nan_to_num(nan=torch.inf)
            self.worst = torch.maximum(self.worst, error)

    def read(self, num_exchanges: int) -> tuple[float, int]:
        """The largest error, and the most wrong messages, of a rank so far.

        Raises: ValueError if there are any.
        """
        found = torch.stack([self.worst, self.num_wrong])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        worst, num_wrong = found.tolist()
        summary = f"{num_exchanges:,} exchanges: error {worst:.1e}, {num_wrong:.0f} wrong messages"
        if not worst < TOLERANCE or num_wrong:
            raise ValueError(summary)
        if dist.get_rank() == 0:
            print(summary, flush=True)
        return worst, int(num_wrong)


def draw(case: Case, device: torch.device, rank: int, number: int, ep: int) -> Sample:
    """A sample and its results, by a dense computation."""
    generator = torch.Generator(device).manual_seed(1000 * rank + number)
    shape = case.tokens, case.width
    x_TD, grad_TD = (torch.randn(shape, device=device, generator=generator) for _ in range(2))
    scores_TK = torch.rand(case.tokens, case.choices, device=device, generator=generator)
    preference_TE = torch.rand(case.tokens, case.experts, device=device, generator=generator)
    if number % 3 == 1:  # skewed: the first experts of every rank
        preference_TE += 1.0 / (1 + torch.arange(case.experts, device=device) % (case.experts // ep))
    if number % 3 == 2:  # one rank has all
        preference_TE[:, case.experts // ep :] -= 2.0
    ids_TK = preference_TE.topk(case.choices).indices
    x, scores = x_TD.clone().requires_grad_(), scores_TK.clone().requires_grad_()
    y_TD = x * (scores * expert_factors(case, device)[ids_TK]).sum(1, keepdim=True)
    results = [y_TD.detach(), *torch.autograd.grad(y_TD, [x, scores], grad_TD)]
    return Sample(x_TD, ids_TK, scores_TK, grad_TD, results)


def draw_message(case: Case, device: torch.device, rank: int, number: int) -> Tensor:
    """What a rank sends."""
    generator = torch.Generator(device).manual_seed(-1 - 1000 * rank - number)
    return torch.randn(case.tokens, case.width, device=device, generator=generator)


if __name__ == "__main__":
    main()
