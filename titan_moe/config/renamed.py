"""Renamed and removed keys of recipes, and what others call ours: the error for such a key names its replacement or the
reason."""

RENAMED = {
    "parallel.gathers_once_a_step": "parallel.accumulate_unsharded",
    "perf.optimizer": "optim.kind (torch -> adamw, fused -> fused_adamw)",
    "train.force_balanced_routing": "train.forced_load (true -> balanced; false: drop it)",
    "train.force_skewed_routing": "train.forced_load (true -> skewed; false: drop it)",
    "perf.override.slots": "perf.override.permute",
}
"""Old key -> new key, and its new values if they changed too."""

REMOVED = {
    "parallel.chunks": "exchanges in chunks were slower",
    'parallel.overlap = "layer"': 'overlap = "microbatch" hides more between nodes, overlap = "tile" inside a node',
    "perf.override.norm": "PyTorch's norm was as fast; it is used everywhere",
}
"""Removed key, or value of a key -> the reason."""

NAMES_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "batch_size": "train.global_batch_sequences",
    "global_batch_size": "train.global_batch_sequences",
    "micro_batch_size": "train.micro_batch_sequences",
    "local_batch_size": "train.micro_batch_sequences",
    "seq_len": "train.seq_len_tokens",
    "seq_length": "train.seq_len_tokens",
    "num_experts_per_tok": "model.moe.top_k",
} | {
    f"{axis}_parallel{word}": f"parallel.{key}"
    for axis, key in {"tensor": "tp", "context": "cp", "pipeline": "pp", "expert": "ep", "expert_tensor": "etp"}.items()
    for word in ("", "_size", "_degree")
}
"""What other frameworks call a field -> its key."""
