"""Ring attention (arXiv:2310.01889): keys and values are passed around the ranks, and no rank has all of them.

P ranks · B batch · n tokens of a rank · H heads · G key/value heads · D head width

A rank keeps its queries. In each of P steps it attends to the keys and values of one rank and merges the result with
those before by their log-sum-exp, while the next keys and values arrive from the rank before it. A sink is one more
key without a value: it joins at the end, and gradients of keys read the log-sum-exp with it.

Own tokens are a chunk from the start and one from the end of each sequence (`SequenceShard`), so of every other rank's
block half of the pairs is visible, and only these are computed, without a mask:

| keys of | visible |
|---|---|
| this rank | causal: its tokens are in ascending order |
| a rank before it | to all queries, the first chunk of keys; the last is later than all queries |
| a rank behind it | to the last chunk of queries, all keys; its first chunk is earlier than all keys |

In backward keys and values are passed around again. Their gradients follow one step behind, and each rank adds its
part. They are in fp32 or wider, because they would otherwise be rounded on every rank. They start at the first rank
that receives the keys and end at the rank of the keys, which adds its own part last. So for each of its tokens a rank
receives (P - 1)·2·G·D elements in forward, as many in backward, and as many gradients.

PyTorch's ring attention is private, has no CPU kernels and differs between torch 2.11 and 2.13.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_moe.kernels.attention.max_logits import ALL_CAUSAL, ALL_PAIRS, Pairs
from titan_moe.kernels.choose import MAX_LOGITS
from titan_moe.layers.attention import Context
from titan_moe.parallel.attention_block import (
    AttendedBlock,
    add_sinks,
    attend_to_block,
    block_gradients,
    merge,
    sink_gradients,
)


class RingAttention:
    """`attend` of an attention layer whose rank has a chunk from the start and one from the end of each sequence."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        self.group, self.backend = group, backend

    def __call__(
        self,
        q_BnHD: Tensor,
        k_BnGD: Tensor,
        v_BnGD: Tensor,
        context: Context,
        scale: float,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Plain causal attention to whole sequences: -> [B, n, H, D]."""
        if sinks_H is not None:
            sinks_H = sinks_H.clone()  # kept for backward, when FSDP has taken the parameter's memory back
        return _ring_attention(q_BnHD, k_BnGD, v_BnGD, scale, self.backend, self.group.group_name, sinks_H)[0]


@torch.library.custom_op("titan_moe::ring_attention", mutates_args=())
def _ring_attention(
    q_BnHD: Tensor, k_BnGD: Tensor, v_BnGD: Tensor, scale: float, backend: str, group: str, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    ring, half = _Ring(_resolve_process_group(group)), q_BnHD.shape[1] // 2
    kv_2BnGD = torch.stack([k_BnGD, v_BnGD])
    accumulated = torch.promote_types(q_BnHD.dtype, torch.float32)
    out_BnHD, lse_BHn = q_BnHD.new_empty(()), q_BnHD.new_empty(())
    for step in range(ring.num_ranks):
        arriving = ring.pass_on(kv_2BnGD) if step < ring.num_ranks - 1 else None
        k, v = kv_2BnGD
        if step == 0:
            own = attend_to_block(q_BnHD, k, v, backend, scale, is_causal=True)
            out_BnHD = own.out_BnHD.to(accumulated, memory_format=torch.contiguous_format, copy=True)
            lse_BHn = own.lse_BHn.contiguous()
        elif ring.is_from_before(step):
            block = attend_to_block(q_BnHD, k[:, :half], v[:, :half], backend, scale, is_causal=False)
            merge(AttendedBlock(out_BnHD, lse_BHn), block)
        else:
            block = attend_to_block(q_BnHD[:, half:], k, v, backend, scale, is_causal=False)
            merge(AttendedBlock(out_BnHD[:, half:], lse_BHn[:, :, half:]), block)
        if arriving is not None:
            kv_2BnGD = arriving.wait()
    if sinks_H is not None:
        add_sinks(AttendedBlock(out_BnHD, lse_BHn), sinks_H)
    return out_BnHD.to(q_BnHD.dtype), lse_BHn


@_ring_attention.register_fake
def _(q_BnHD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, num_tokens, num_heads, _ = q_BnHD.shape
    accumulated = torch.promote_types(q_BnHD.dtype, torch.float32)
    return q_BnHD.new_empty(q_BnHD.shape), q_BnHD.new_empty((batch, num_heads, num_tokens), dtype=accumulated)


@torch.library.custom_op("titan_moe::ring_attention_backward", mutates_args=())
def _ring_attention_backward(
    dout_BnHD: Tensor, q_BnHD: Tensor, k_BnGD: Tensor, v_BnGD: Tensor, out_BnHD: Tensor, lse_BHn: Tensor,
    scale: float, backend: str, group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ring, half = _Ring(_resolve_process_group(group)), q_BnHD.shape[1] // 2
    dout_BnHD, accumulated = dout_BnHD.contiguous(), lse_BHn.dtype
    last = AttendedBlock(out_BnHD[:, half:], lse_BHn[:, :, half:])
    kv_2BnGD = torch.stack([k_BnGD, v_BnGD])
    whole, passed = AttendedBlock(out_BnHD, lse_BHn), torch.zeros_like(kv_2BnGD, dtype=accumulated)
    dq_BnHD, dkv_2BnGD = torch.empty_like(out_BnHD, dtype=accumulated), torch.empty_like(passed)
    gradients: _Arriving | None = None
    for step in range(ring.num_ranks):
        arriving = ring.pass_on(kv_2BnGD) if step < ring.num_ranks - 1 else None
        k, v = kv_2BnGD
        if step == 0:
            dq, dk, dv = block_gradients(dout_BnHD, q_BnHD, k, v, whole, backend, scale, is_causal=True)
            dq_BnHD.copy_(dq)
            dkv_2BnGD[0].copy_(dk)
            dkv_2BnGD[1].copy_(dv)
        else:
            if ring.is_from_before(step):
                k, v, keys = k[:, :half], v[:, :half], slice(half)
                dq, dk, dv = block_gradients(dout_BnHD, q_BnHD, k, v, whole, backend, scale, is_causal=False)
                dq_BnHD += dq
            else:
                dout, q, keys = dout_BnHD[:, half:], q_BnHD[:, half:], slice(None)
                dq, dk, dv = block_gradients(dout, q, k, v, last, backend, scale, is_causal=False)
                dq_BnHD[:, half:] += dq
            if gradients is not None:
                passed = gradients.wait()
            passed[0][:, keys] += dk
            passed[1][:, keys] += dv
            gradients = ring.pass_on(passed)
        if arriving is not None:
            kv_2BnGD = arriving.wait()
    if gradients is not None:
        dkv_2BnGD += gradients.wait()
    dk_BnGD, dv_BnGD = (x_BnGD.to(k_BnGD.dtype, copy=True) for x_BnGD in dkv_2BnGD)  # results share no memory
    return dq_BnHD.to(q_BnHD.dtype), dk_BnGD, dv_BnGD


@_ring_attention_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *qkv, ctx.scale, ctx.backend, ctx.group, sinks_H = inputs
    ctx.save_for_backward(*qkv, *output, sinks_H)
    ctx.set_materialize_grads(False)  # the log-sum-exp has none


def _gradients(ctx: Any, dout_BnHD: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, sinks_H = ctx.saved_tensors
    grads = _ring_attention_backward(dout_BnHD, *saved, ctx.scale, ctx.backend, ctx.group)
    dsinks_H = None if sinks_H is None else sink_gradients(dout_BnHD, AttendedBlock(*saved[3:]), sinks_H)
    return *grads, None, None, None, dsinks_H


_ring_attention.register_autograd(_gradients, setup_context=_save)


class RingMaxLogits:
    """`measure` of an attention layer of `RingAttention`: keys are passed around once more, without values."""

    def __init__(self, group: dist.ProcessGroup, kernels: str) -> None:
        self.group, self.kernels = group, kernels

    def __call__(self, q_BnHD: Tensor, k_BnGD: Tensor, scale: float, pairs: Pairs) -> Tensor:
        """The largest logits of this rank's queries and all keys that they see: [H]."""
        return _ring_max_logits(q_BnHD, k_BnGD, scale, self.kernels, self.group.group_name)


@torch.library.custom_op("titan_moe::ring_max_logits", mutates_args=())
def _ring_max_logits(q_BnHD: Tensor, k_BnGD: Tensor, scale: float, kernels: str, group: str) -> Tensor:
    ring, half, measure = _Ring(_resolve_process_group(group)), q_BnHD.shape[1] // 2, MAX_LOGITS[kernels]
    k_BnGD, largest_H = k_BnGD.contiguous(), q_BnHD.new_empty(())
    for step in range(ring.num_ranks):
        arriving = ring.pass_on(k_BnGD) if step < ring.num_ranks - 1 else None
        if step == 0:
            largest_H = measure(q_BnHD, k_BnGD, scale, ALL_CAUSAL)
        else:
            is_before = ring.is_from_before(step)
            q, k = (q_BnHD, k_BnGD[:, :half]) if is_before else (q_BnHD[:, half:], k_BnGD)
            largest_H = torch.maximum(largest_H, measure(q, k, scale, ALL_PAIRS))
        if arriving is not None:
            k_BnGD = arriving.wait()
    return largest_H


@_ring_max_logits.register_fake
def _(q_BnHD: Tensor, *_: Any) -> Tensor:
    return q_BnHD.new_empty(q_BnHD.shape[2], dtype=torch.promote_types(q_BnHD.dtype, torch.float32))


class _Arriving(NamedTuple):
    """A tensor that arrives, beside that which is sent and must be kept until then."""

    received: Tensor
    sent: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        """The received tensor; on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.received


class _Ring:
    """The ranks of a group, each with one before and one behind it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()

    def is_from_before(self, step: int) -> bool:
        """Whether the keys of a step after the first are of a rank before this one."""
        return step <= self.rank

    def pass_on(self, sent: Tensor) -> _Arriving:
        """Start to send a tensor to the rank behind and to receive one like it from the rank before."""
        received = torch.empty_like(sent)
        behind, before = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks
        messages = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=behind),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=before),
        ]
        return _Arriving(received, sent, dist.batch_isend_irecv(messages))
