"""The one door to torchtitan: its leaves, imported when first used, on hosts with and without an accelerator.

No other room says `import torchtitan`, so one folder knows its version, its traps and its log. What we want from it:
checkpoints (`CheckpointManager`), containers that reshard optimizers and schedules, the Hugging Face tokenizer, and
garbage collection at the same step on all ranks. What we leave there: `init_distributed` overwrites NCCL's environment
and picks a backend by what the host has instead of what the run uses, `set_determinism` wants its own mesh class,
`get_peak_flops` asks `lspci` and takes an unknown GPU for an A100, and the TensorBoard writer knows no resume.
"""

from typing import TYPE_CHECKING, Any

from titan_moe.titan.import_guard import import_torchtitan

if TYPE_CHECKING:
    from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.tools.utils import GarbageCollection

    from titan_moe.titan.checkpoints import build_checkpoint_manager

__all__ = [
    "CheckpointManager",
    "GarbageCollection",
    "HuggingFaceTokenizer",
    "LRSchedulersContainer",
    "ModelWrapper",
    "OptimizersContainer",
    "build_checkpoint_manager",
    "import_torchtitan",
]

_TORCHTITAN_HOMES = {
    "CheckpointManager": "components.checkpoint",
    "ModelWrapper": "components.checkpoint",
    "LRSchedulersContainer": "components.lr_scheduler",
    "OptimizersContainer": "components.optimizer",
    "HuggingFaceTokenizer": "components.tokenizer",
    "GarbageCollection": "tools.utils",
}


def __getattr__(name: str) -> Any:
    """Fetch a leaf from its home at first use (PEP 562): importing this room costs neither torch nor torchtitan."""
    if name in _TORCHTITAN_HOMES:
        return getattr(import_torchtitan(_TORCHTITAN_HOMES[name]), name)
    if name == "build_checkpoint_manager":
        from titan_moe.titan.checkpoints import build_checkpoint_manager

        return build_checkpoint_manager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
