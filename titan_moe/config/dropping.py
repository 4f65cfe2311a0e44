"""The capacity of an expert, beyond which assignments are dropped."""

import math


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, capacity_factor: float) -> int:
    """The tokens that an expert takes of so many, at most (Megatron Core's `get_capacity`)."""
    return math.ceil(num_tokens * top_k / num_experts * capacity_factor)
