"""The table of a model's modules: what only some layouts show."""

import pytest

from titan_moe.config.model import AttentionConfig, ModelConfig
from titan_moe.config.modules import modules_of
from titan_moe.config.parallel import ParallelConfig

MLA = AttentionConfig(
    kind="mla", num_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=0
)


@pytest.mark.parametrize(
    ("parallel", "own_outputs", "latents", "rebuilt"),
    [
        (ParallelConfig(), 4 * (8 + 6), 1, 1),
        (ParallelConfig(tp=2), 2 * (8 + 6), 2, 1),
        (ParallelConfig(cp=2), 2 * (8 + 6), 2, 1),
        (ParallelConfig(cp=2, tp=2), 8 + 6, 4, 1),
        (ParallelConfig(cp=2, cp_kind="allgather"), 4 * (8 + 6), 2, 2),
    ],
    ids=["alone", "tp", "ulysses", "ulysses-tp", "allgather"],
)
def test_kv_up_reads_the_latents_of_all_ranks(
    parallel: ParallelConfig, own_outputs: int, latents: int, rebuilt: int
) -> None:
    """With `ulysses` a rank rebuilds its heads of all tokens, with `allgather` all heads of them."""
    modules = modules_of(ModelConfig(attention=MLA), parallel)
    (kv_up,) = (module for module in modules if module.path == "attention.kv_up")
    assert kv_up.widths == (16, 4 * (8 + 6)) and kv_up.own_widths == (16, own_outputs)
    assert kv_up.kept == kv_up.gradients == latents * 16 + rebuilt * 4 * (8 + 6)
    assert kv_up.kept_as_codes == -latents * 16 / 2, "codes instead of what nothing else reads"
