"""The one door to torchtitan: its leaves, imported when first used, on hosts with and without an accelerator.

No other room says `import torchtitan`, so one folder knows its version, its traps and its log. What we want from it:
checkpoints (`CheckpointManager`), containers that reshard optimizers and schedules, the Hugging Face tokenizer, the
TensorBoard writer, the memory monitor, garbage collection at the same step on all ranks, profiler contexts, and its
pipeline splitters. What it offers but we own, because its version edits the environment, asks the wrong device or
needs its own mesh class, is in `process_group.py` and `seeds.py`; peak FLOP/s come from `plan.hardware` (torchtitan
asks `lspci`, and takes an unknown GPU for an A100).
"""

from typing import TYPE_CHECKING, Any

from titan_moe.titan.door import import_torchtitan

if TYPE_CHECKING:
    from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper
    from torchtitan.components.lr_scheduler import LRSchedulersContainer, build_lr_schedulers
    from torchtitan.components.metrics import DeviceMemoryMonitor, TensorBoardLogger
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part, pipeline_module_split
    from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
    from torchtitan.tools.utils import GarbageCollection

    from titan_moe.titan.checkpoints import build_checkpoint_manager
    from titan_moe.titan.process_group import init_distributed
    from titan_moe.titan.seeds import set_determinism

__all__ = [
    "CheckpointManager",
    "DeviceMemoryMonitor",
    "GarbageCollection",
    "HuggingFaceTokenizer",
    "LRSchedulersContainer",
    "ModelWrapper",
    "OptimizersContainer",
    "TensorBoardLogger",
    "build_checkpoint_manager",
    "build_lr_schedulers",
    "generate_llm_fqn_per_model_part",
    "import_torchtitan",
    "init_distributed",
    "maybe_enable_memory_snapshot",
    "maybe_enable_profiling",
    "pipeline_module_split",
    "set_determinism",
]

_TORCHTITAN_HOMES = {
    "CheckpointManager": "components.checkpoint",
    "ModelWrapper": "components.checkpoint",
    "LRSchedulersContainer": "components.lr_scheduler",
    "build_lr_schedulers": "components.lr_scheduler",
    "DeviceMemoryMonitor": "components.metrics",
    "TensorBoardLogger": "components.metrics",
    "OptimizersContainer": "components.optimizer",
    "HuggingFaceTokenizer": "components.tokenizer",
    "generate_llm_fqn_per_model_part": "distributed.pipeline_parallel",
    "pipeline_module_split": "distributed.pipeline_parallel",
    "maybe_enable_memory_snapshot": "tools.profiling",
    "maybe_enable_profiling": "tools.profiling",
    "GarbageCollection": "tools.utils",
}
_OWN_HOMES = {
    "build_checkpoint_manager": "checkpoints",
    "init_distributed": "process_group",
    "set_determinism": "seeds",
}


def __getattr__(name: str) -> Any:
    """Fetch a leaf from its home at first use (PEP 562): importing this room costs neither torch nor torchtitan."""
    if name in _TORCHTITAN_HOMES:
        return getattr(import_torchtitan(_TORCHTITAN_HOMES[name]), name)
    if name in _OWN_HOMES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_OWN_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
