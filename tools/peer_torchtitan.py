"""Time torchtitan's own Trainer on its own models, for comparison.

    torchrun --nproc-per-node 8 tools/peer_torchtitan.py --model qwen3_30b_a3b --ep 8 --batch 4 --out peer.json

Written for torchtitan 0.2.2 on NVIDIA GPUs. The settings are those of torchtitan's launcher and recipes: expandable
memory segments, compiled model and loss, fused AdamW, FSDP2 over all ranks, fp32 masters, bf16 compute. Only the data
differs: random tokens, so that nothing is downloaded and no data loader is measured.

With `--pp` torchtitan back-propagates a loss that is not divided by the number of tokens. Clipping hides it, and the
speed does not depend on it. Without sharded parameters (FSDP2 or cp) it has no mixed precision beside pp or tp: it
would compute in fp32. Then weights, gradients and moments are in bf16 too, which is less work than ours.

torchtitan's attention is cuDNN's, or flash, or PyTorch's plain one, the first that takes the input. With `--attention
cudnn` or `flash` it is that one alone: an input that it does not take is an error, with the reason. With `--cp` and
`cudnn` the strides in backward are made equal, which https://github.com/pytorch/pytorch/issues/176915 proposes. On
torch 2.11 `--cp` fails with compiled blocks under selective recompute all the same. It is fastest with `--recompute
none`; it also runs with `--no-compile`.
"""

import argparse
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # before the import: torch reads it once

import torch
import torch.distributed as dist
from measurement import max_over_ranks
from rank_processes import write_once
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config import job_config as titan
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec, register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

FLAVORS = {
    "qwen3_30b_a3b": ("qwen3", "30B-A3B"),
    "deepseek_v2_lite": ("deepseek_v3", "16B"),
    "deepseek_v3": ("deepseek_v3", "671B"),
}
"""Name of the shape here -> torchtitan's model and flavor. Its DeepSeek-V3 "16B" has the shape of DeepSeek-V2-Lite."""

PEER = "peer"
"""The name under which the changed train spec is registered, for torchtitan's Trainer."""
SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Those of torch.distributed.pipelining that ours are compared with."""
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
FLOAT8 = ["quantize.linear.float8", "float8_experts"]
"""Converters of torchtitan's registry; the second is registered here."""


class RandomTokens(BaseDataLoader):
    """An endless stream of uniform random tokens per rank. Labels are the next tokens."""

    def __init__(
        self, vocab_size: int, *, dp_rank: int, job_config: titan.JobConfig, dp_world_size: int, tokenizer: object
    ) -> None:
        del dp_world_size, tokenizer  # torchtitan passes them to every loader
        self.vocab_size = vocab_size
        self.shape = (job_config.training.local_batch_size, job_config.training.seq_len + 1)
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = torch.randint(self.vocab_size, self.shape, generator=self.generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FLAVORS, required=True)
    parser.add_argument("--num-layers", type=int, help="number of layers; default all")
    parser.add_argument("--num-dense-layers", type=int, help="of DeepSeek's; default as in the model")
    parser.add_argument("--num-experts", type=int, help="default as in the model")
    parser.add_argument("--num-groups", type=int, help="of experts, with --top-k-groups; default as in the model")
    parser.add_argument("--top-k-groups", type=int, help="groups whose experts a token may choose")
    parser.add_argument("--seq", type=int, default=4096, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences per data-parallel rank and step")
    parser.add_argument("--ep", type=int, default=1, help="expert parallel degree; divides the number of ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree; experts are not split by it")
    parser.add_argument("--cp", type=int, default=1, help="context parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel degree")
    parser.add_argument("--pp-schedule", choices=SCHEDULES, default="1F1B", help="all but 1F1B have 2 stages a rank")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step, with --pp; divides --batch")
    parser.add_argument("--float8", action="store_true", help="linear layers and experts in torchao's rowwise float8")
    parser.add_argument("--steps", type=int, default=15, help="timed optimizer steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones")
    parser.add_argument("--recompute", choices=("selective", "none", "full"), default="selective")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--attention", choices=("sdpa", *BACKENDS, "flex"), default="sdpa", help="causal; see above")
    routing = parser.add_mutually_exclusive_group()
    routing.add_argument("--forced-balance", dest="balance_is_forced", action="store_true", default=True)
    routing.add_argument("--natural", dest="balance_is_forced", action="store_false")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    if args.batch % args.microbatches:
        parser.error(f"--microbatches {args.microbatches} does not divide --batch {args.batch}")
    if args.microbatches > 1 and args.pp == 1:
        parser.error(f"--microbatches {args.microbatches} needs --pp; without it torchtitan has one")
    return args


def peer_spec(args: argparse.Namespace) -> TrainSpec:
    """torchtitan's train spec with other numbers of layers, experts and groups, plain causal attention and random data.

    The DeepSeek flavor uses document masks, which the comparison does not, so both sides get the causal mask. Flex
    attention requires a tokenizer that it does not use with this mask, so it gets an empty object. torchtitan's Qwen3
    can be split into stages, but its spec has no function for it, so it gets that of the other models.
    """
    name, flavor = FLAVORS[args.model]
    spec = get_train_spec(name)
    model_args = spec.model_args[flavor]
    groups = given(num_expert_groups=args.num_groups, num_limited_groups=args.top_k_groups)
    model_args = replace(
        model_args,
        **given(n_layers=args.num_layers, n_dense_layers=args.num_dense_layers),
        moe_args=replace(model_args.moe_args, **given(num_experts=args.num_experts), **groups),
        attn_type="flex" if args.attention == "flex" else "sdpa",
        attn_mask_type="causal",
    )
    return replace(
        spec,
        model_args={flavor: model_args},
        build_dataloader_fn=partial(RandomTokens, model_args.vocab_size),
        build_tokenizer_fn=(lambda job_config: SimpleNamespace()) if args.attention == "flex" else None,
        build_validator_fn=None,
        pipelining_fn=pipeline_llm,
        state_dict_adapter=None,
    )


def given(**numbers: int | None) -> dict[str, int]:
    """Those that the command line has."""
    return {name: number for name, number in numbers.items() if number is not None}


class Float8Experts:
    """torchao's float8 for grouped GEMMs, as torchtitan 0.2.2 asks for it from an older torchao."""

    def __init__(self, job_config: titan.JobConfig, parallel_dims: object) -> None:
        set_token_group_alignment_size_m(16)

    def convert(self, model: torch.nn.Module) -> None:
        from torchao.prototype.moe_training.config import Float8TrainingOpConfig
        from torchao.quantization import quantize_

        quantize_(model, Float8TrainingOpConfig(), filter_fn=lambda module, name: name.endswith(".experts"))

    def post_optimizer_hook(self, model: object) -> None:
        """It has none."""


def with_equal_strides(
    backward: Callable[..., tuple[torch.Tensor, ...]],
    mesh: DeviceMesh,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, ...]:
    """PyTorch's backward of ring attention by cuDNN, which requires equal strides of the result and its gradient."""
    return backward(mesh, grad_out.contiguous(), query, key, value, out.contiguous(), *args, **kwargs)


def has_mixed_precision(args: argparse.Namespace) -> bool:
    """Whether torchtitan computes in bf16 with fp32 weights."""
    is_sharded = int(os.environ["WORLD_SIZE"]) > args.pp * args.tp  # over dp or cp
    return is_sharded or args.pp == args.tp == 1


def peer_config(args: argparse.Namespace) -> titan.JobConfig:
    """torchtitan's configuration of the run. Other settings keep their defaults."""
    num_steps = args.warmup + args.steps
    return titan.JobConfig(
        model=titan.Model(name=PEER, flavor=FLAVORS[args.model][1], converters=FLOAT8 if args.float8 else []),
        optimizer=titan.Optimizer(lr=1e-4, implementation="fused"),
        lr_scheduler=titan.LRScheduler(warmup_steps=min(2, num_steps)),
        training=titan.Training(
            local_batch_size=args.batch,
            seq_len=args.seq,
            steps=num_steps,
            dtype="float32" if has_mixed_precision(args) else "bfloat16",
            mixed_precision_param="bfloat16",
        ),
        parallelism=titan.Parallelism(
            data_parallel_shard_degree=-1,
            expert_parallel_degree=args.ep,
            tensor_parallel_degree=args.tp,
            context_parallel_degree=args.cp,
            pipeline_parallel_degree=args.pp,
            pipeline_parallel_schedule=args.pp_schedule,
            pipeline_parallel_microbatch_size=args.batch // args.microbatches,
        ),
        quantize=titan.Quantize(
            linear=titan.QuantizedLinear(
                float8=titan.Float8Linear(recipe_name="rowwise", filter_fqns=["output", "router.gate"])
            )
        ),
        activation_checkpoint=titan.ActivationCheckpoint(mode=args.recompute, selective_ac_option="op"),
        compile=titan.Compile(enable=args.compile, components=["model", "loss"]),
        metrics=titan.Metrics(log_freq=num_steps + 1, disable_color_printing=True),  # only step 1 is logged
        comm=titan.Comm(init_timeout_seconds=900, trace_buf_size=0),  # autotuning is slow; no flight recorder files
        debug=titan.Debug(seed=0, moe_force_load_balance=args.balance_is_forced),
    )


def step_times_ms(trainer: Trainer, batches: Iterator[Any], num_steps: int) -> list[float]:
    """Run optimizer steps as `Trainer.train` does, and time each on this rank between device synchronisations."""
    times_ms = []
    for _ in range(num_steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)  # data, forward, backward, clip, optimizer, learning rate schedule
        torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms


def count_parameters(trainer: Trainer, pp: int) -> int:
    """The parameters of all stages; ranks of one stage count the same ones."""
    of_rank = torch.tensor(sum(p.numel() for part in trainer.model_parts for p in part.parameters()))
    total = of_rank.to(trainer.device)
    dist.all_reduce(total)
    return int(total) * pp // dist.get_world_size()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Build the peer, warm it up and time it. Returns the figures, reduced over ranks."""
    register_train_spec(PEER, peer_spec(args))
    register_model_converter(Float8Experts, FLOAT8[1])
    if args.attention in BACKENDS:
        ScaledDotProductAttentionWrapper.sdpa_backends = [BACKENDS[args.attention]]
    if args.attention == "cudnn" and args.cp > 1:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring_attention

        ring_attention._scaled_dot_product_ring_cudnn_attention_backward = partial(
            with_equal_strides, ring_attention._scaled_dot_product_ring_cudnn_attention_backward
        )
    trainer = Trainer(peer_config(args))
    batches = trainer.batch_generator(trainer.dataloader)
    step_times_ms(trainer, batches, args.warmup)
    torch.cuda.reset_peak_memory_stats()
    step_ms = max_over_ranks(step_times_ms(trainer, batches, args.steps), trainer.device)
    peak_bytes = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    allocated_gib, reserved_gib = max_over_ranks([num_bytes / 2**30 for num_bytes in peak_bytes], trainer.device)
    median_ms = statistics.median(step_ms)
    trainer.close()
    return {
        "tokens_per_second_per_gpu": args.batch * args.seq / (args.tp * args.cp * args.pp) / median_ms * 1e3,
        "median_step_ms": median_ms,
        "step_ms": step_ms,
        "peak_memory_gib": allocated_gib,
        "peak_reserved_gib": reserved_gib,
        "num_parameters": count_parameters(trainer, args.pp),
        "model_args": asdict(trainer.model_args),
    }


def circumstances(args: argparse.Namespace) -> dict[str, Any]:
    """The settings, device and versions of a measurement."""
    return {
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "num_gpus": int(os.environ["WORLD_SIZE"]),
        "optimizer": f"AdamW, fused, {'fp32 masters' if has_mixed_precision(args) else 'bf16 weights'}, gradients and "
        "moments; bf16 compute",
        "alloc_conf": os.environ["PYTORCH_ALLOC_CONF"],
        "device": torch.cuda.get_device_name(),
        "versions": {
            **{package: version(package) for package in ("torch", "torchtitan", "triton")},
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "python": platform.python_version(),
        },
    }


def main() -> None:
    """Measure, and write the figures or the error."""
    args = parse_args()
    is_first_rank = int(os.environ["RANK"]) == 0
    if is_first_rank:
        init_logger()
        args.out.unlink(missing_ok=True)
    try:
        figures = measure(args)
    except Exception as error:
        traceback.print_exc()
        write_once(args.out, {"error": f"{type(error).__name__}: {error}", **circumstances(args)})
        os._exit(1)  # the other ranks may wait in a collective, and a clean shutdown would wait for them
    if is_first_rank:
        result = {**figures, **circumstances(args)}
        write_once(args.out, result)
        print(json.dumps(result, indent=2), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
