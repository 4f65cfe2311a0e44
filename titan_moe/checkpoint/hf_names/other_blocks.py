"""Families that are refused because some of their blocks have no layer here: what these blocks are."""

DELTA = "blocks of linear attention by a gated delta rule"
MAMBA, MAMBA_2 = "Mamba blocks, a selective state space", "Mamba-2 blocks, a selective state space"
CONVOLUTIONS = "blocks of short convolutions"
OTHER_BLOCKS = {
    "bailing_hybrid": DELTA,
    "kimi_linear": DELTA,
    "olmo_hybrid": DELTA,
    "qwen3_5": DELTA,
    "qwen3_5_moe": DELTA,
    "qwen3_next": DELTA,
    "falcon_mamba": MAMBA,
    "jamba": MAMBA,
    "mamba": MAMBA,
    "zamba": MAMBA,
    "bamba": MAMBA_2,
    "falcon_h1": MAMBA_2,
    "granitemoehybrid": MAMBA_2,
    "mamba2": MAMBA_2,
    "nemotron_h": MAMBA_2,
    "zamba2": MAMBA_2,
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "minimax": "blocks of linear attention (lightning attention)",
    "minimax_text_01": "blocks of linear attention (lightning attention)",
    "recurrent_gemma": "blocks of gated linear recurrences",
    "rwkv": "blocks of linear attention with decay",
    "xlstm": "blocks of matrix memories",
}
"""`model_type` of a config.json, without `_text` -> its blocks."""
