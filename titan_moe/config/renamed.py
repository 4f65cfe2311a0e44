"""Keys of earlier recipes, so that the error for one names its successor."""

RENAMED = {
    "parallel.gathers_once_a_step": "parallel.accumulate_unsharded",
    "perf.optimizer": "optim.kind (torch -> adamw, fused -> fused_adamw)",
    "perf.override.slots": "perf.override.permute",
}
"""Old key -> new key, and how its values are called now if they changed too."""

REMOVED = {
    "parallel.chunks": "messages in chunks were slower than whole ones",
    'parallel.overlap = "layer"': 'overlap = "microbatch" hides more between nodes, overlap = "tile" inside a node',
    "perf.override.norm": "PyTorch's norm was as fast; it is used everywhere",
}
"""Old key, or old value of a key -> why nothing took its place."""
