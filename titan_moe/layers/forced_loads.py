"""Draw expert ids with the loads of config/forced_loads.py, whose distribution is known.

T tokens of a rank · E experts · K choices a token · P ranks, each with E/P consecutive experts

A load is a function of its name, layer and step, and a token's ids are drawn from a generator, so that any dispatcher
gets the same ids. Layers are those with experts, from 0.
"""

import torch
from torch import Tensor

from titan_moe.config.forced_loads import BURST_STEPS, DRAWN_LOADS, DRIFT_STEPS, HEAT


def draw_ids(
    load: str,
    *,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_ranks: int,
    layer: int,
    step: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw the expert ids of one rank's tokens.

    Shapes: -> int64 [T, K] on the generator's device. A token's experts are distinct. Its last choices are -1 where
    fewer than K experts get tokens, and all of them are where it has none.

    Raises: ValueError for an unknown load.
    """
    device = generator.device
    weights_E = _weights(load, num_experts, top_k, num_ranks, layer, step).to(device)
    # the K largest of weight over exponential noise are K draws by weight, without replacement
    noise_TE = torch.empty(num_tokens, num_experts, device=device).exponential_(generator=generator)
    largest = (weights_E / noise_TE.clamp(min=1e-30)).topk(top_k)
    ids_TK = torch.where(largest.values > 0, largest.indices, -1)
    if load == "ragged_sources":
        end = torch.randint(1, num_tokens + 1, (), device=device, generator=generator)
        ids_TK[torch.arange(num_tokens, device=device) >= end] = -1
    return ids_TK


def generator_of(rank: int, layer: int, step: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for each rank, layer and step."""
    return torch.Generator(device).manual_seed((step * 10_000 + layer) * 10_000 + rank)


def _weights(load: str, num_experts: int, top_k: int, num_ranks: int, layer: int, step: int) -> Tensor:
    """Relative likelihood of each expert, [E]."""
    weights_Pe = torch.ones(num_ranks, num_experts // num_ranks)
    match load:
        case "uniform" | "ragged_sources":
            pass
        case "hot_expert":
            weights_Pe[0, 0] = HEAT
        case "spread_hot_experts":
            weights_Pe[:, 0] = HEAT
        case "hot_rank":
            weights_Pe[0] = HEAT
        case "alternating":
            weights_Pe[layer % num_ranks] = HEAT
        case "drifting":
            weights_Pe += (HEAT - 1) * _drifting_shares(num_ranks, step)[:, None]
        case "bursts" if step % BURST_STEPS == BURST_STEPS - 1:
            weights_Pe[torch.arange(num_ranks) != step // BURST_STEPS % num_ranks] = 0
        case "bursts":
            pass
        case "cold_ranks":
            weights_Pe[(num_ranks + 1) // 2 :] = 0
        case "one_rank":
            weights_Pe[1:] = 0
        case "one_rank_in_one_layer":
            weights_Pe[1 if layer == 0 else num_ranks :] = 0
        case "collapsed":
            weights_Pe.view(-1)[top_k:] = 0
        case _:
            raise ValueError(f"load = {load!r} is unknown; the loads are {', '.join(DRAWN_LOADS)}")
    return weights_Pe.flatten()


def _drifting_shares(num_ranks: int, step: int) -> Tensor:
    """Shares of two neighbours in the heat, [P]; at step 0 those of the first two are equal."""
    position = 0.5 + step / DRIFT_STEPS
    ahead_P = (torch.arange(num_ranks) - position) % num_ranks
    return (1 - torch.minimum(ahead_P, num_ranks - ahead_P)).clamp(min=0)
