"""The adapter to torchtitan: lazy imports of its components, on hosts with and without an accelerator.

No other folder imports torchtitan, so its version, its traps and its logger are handled here. `torchao.py` names the
version of torchao, which other folders import.

Used: `CheckpointManager`, the containers that reshard optimizers and schedules, the Hugging Face tokenizer, and
garbage collection at the same step on all ranks.

Not used: `init_distributed` overwrites NCCL's environment and selects the backend by the host, not by the run;
`set_determinism` needs torchtitan's mesh class; `get_peak_flops` runs `lspci` and treats an unknown GPU as an A100; the
TensorBoard writer does not support a resume.
"""

from typing import TYPE_CHECKING, Any

from titan_moe.titan.import_guard import import_torchtitan

if TYPE_CHECKING:
    from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.tools.utils import GarbageCollection

    from titan_moe.titan.checkpoints import build_checkpoint_manager
    from titan_moe.titan.tokenizers import load_tokenizer

__all__ = [
    "CheckpointManager",
    "GarbageCollection",
    "LRSchedulersContainer",
    "ModelWrapper",
    "OptimizersContainer",
    "build_checkpoint_manager",
    "import_torchtitan",
    "load_tokenizer",
]

_TORCHTITAN_MODULES = {
    "CheckpointManager": "components.checkpoint",
    "ModelWrapper": "components.checkpoint",
    "LRSchedulersContainer": "components.lr_scheduler",
    "OptimizersContainer": "components.optimizer",
    "GarbageCollection": "tools.utils",
}


def __getattr__(name: str) -> Any:
    """Import a component at first use (PEP 562). Importing this package imports neither torch nor torchtitan."""
    if name in _TORCHTITAN_MODULES:
        return getattr(import_torchtitan(_TORCHTITAN_MODULES[name]), name)
    if name == "build_checkpoint_manager":
        from titan_moe.titan.checkpoints import build_checkpoint_manager

        return build_checkpoint_manager
    if name == "load_tokenizer":
        from titan_moe.titan.tokenizers import load_tokenizer

        return load_tokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
