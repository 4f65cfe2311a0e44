"""Train Mixture-of-Experts models with PyTorch, from one readable recipe.

The names below are the public API. They load on first use: `import titan_moe` does not import torch.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "AllGatherDispatcher": "titan_moe.dispatch",
    "AllToAllDispatcher": "titan_moe.dispatch",
    "AttentionConfig": "titan_moe.config.model",
    "Block": "titan_moe.layers.block",
    "DispatcherFacts": "titan_moe.config.dispatchers",
    "GroupedExperts": "titan_moe.layers.experts",
    "Kernels": "titan_moe.config.kernels",
    "LocalDispatcher": "titan_moe.dispatch",
    "MoE": "titan_moe.layers.moe",
    "MoEConfig": "titan_moe.config.model",
    "ModelConfig": "titan_moe.config.model",
    "Recipe": "titan_moe.config.recipe",
    "Routed": "titan_moe.dispatch",
    "SymmMemFusedDispatcher": "titan_moe.dispatch.symm_mem_fused",
    "SymmMemDispatcher": "titan_moe.dispatch.symm_mem",
    "TokenDispatcher": "titan_moe.dispatch",
    "TopKRouter": "titan_moe.layers.router",
    "Transformer": "titan_moe.models.transformer",
    "apply_expert_parallel": "titan_moe.parallel.expert",
    "close_symm_memory": "titan_moe.dispatch.symm_memory",
    "init_weights": "titan_moe.layers.init",
    "linear_cross_entropy": "titan_moe.kernels.loss.cross_entropy",
    "load_recipe": "titan_moe.config.parse",
    "open_symm_memory": "titan_moe.dispatch.symm_memory",
    "register_dispatcher": "titan_moe.parallel.dispatchers",
    "scale_balancing_losses": "titan_moe.parallel.balance",
    "symm_bytes": "titan_moe.kernels.symm_mem.arrays",
    "update_expert_biases": "titan_moe.parallel.balance",
}

__all__ = [*_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "__version__":  # of the installed package: pyproject.toml has the number
        return import_module("importlib.metadata").version("titan_moe")
    if name not in _MODULES:
        raise AttributeError(f"titan_moe has no {name!r}; it has {', '.join(_MODULES)}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
