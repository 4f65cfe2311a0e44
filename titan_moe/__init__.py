"""Train Mixture-of-Experts models with PyTorch, from one readable recipe.

The names below are the public API. They load on first use: `import titan_moe` does not import torch. Type checkers and
editors read the imports.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_moe.checkpoint.hf import load_hf as load_hf
    from titan_moe.checkpoint.hf import save_hf as save_hf
    from titan_moe.checkpoint.hf_folder import HuggingFaceError as HuggingFaceError
    from titan_moe.checkpoint.hf_stream import hf_weights as hf_weights
    from titan_moe.config.adapter import AdapterConfig as AdapterConfig
    from titan_moe.config.adapter import AdapterOfKind as AdapterOfKind
    from titan_moe.config.attention import AttentionConfig as AttentionConfig
    from titan_moe.config.balance import AuxLosses as AuxLosses
    from titan_moe.config.batch_schedule import BatchPhase as BatchPhase
    from titan_moe.config.chat import ChatConfig as ChatConfig
    from titan_moe.config.dispatchers import DispatcherFacts as DispatcherFacts
    from titan_moe.config.kernels import KernelOverrides as KernelOverrides
    from titan_moe.config.kernels import Kernels as Kernels
    from titan_moe.config.mixture import MixtureSource as MixtureSource
    from titan_moe.config.model import (
        ModelConfig as ModelConfig,
    )
    from titan_moe.config.model import (
        MoEConfig as MoEConfig,
    )
    from titan_moe.config.mtp import MTPConfig as MTPConfig
    from titan_moe.config.parallel import ParallelConfig as ParallelConfig
    from titan_moe.config.parameter_groups import ParameterGroup as ParameterGroup
    from titan_moe.config.parse import RecipeError as RecipeError
    from titan_moe.config.parse import load_recipe as load_recipe
    from titan_moe.config.perf import (
        CompileConfig as CompileConfig,
    )
    from titan_moe.config.perf import (
        MemoryConfig as MemoryConfig,
    )
    from titan_moe.config.perf import (
        PerfConfig as PerfConfig,
    )
    from titan_moe.config.precision import PrecisionConfig as PrecisionConfig
    from titan_moe.config.recipe import Recipe as Recipe
    from titan_moe.config.schema import Table as Table
    from titan_moe.config.train import (
        CheckpointConfig as CheckpointConfig,
    )
    from titan_moe.config.train import (
        DataConfig as DataConfig,
    )
    from titan_moe.config.train import (
        MetricsConfig as MetricsConfig,
    )
    from titan_moe.config.train import (
        MuonConfig as MuonConfig,
    )
    from titan_moe.config.train import (
        OptimConfig as OptimConfig,
    )
    from titan_moe.config.train import (
        ProfileConfig as ProfileConfig,
    )
    from titan_moe.config.train import (
        QKClipConfig as QKClipConfig,
    )
    from titan_moe.config.train import (
        RunConfig as RunConfig,
    )
    from titan_moe.config.train import (
        TrainConfig as TrainConfig,
    )
    from titan_moe.config.train import (
        ValidationConfig as ValidationConfig,
    )
    from titan_moe.config.upcycle import UpcycleConfig as UpcycleConfig
    from titan_moe.dispatch import (
        AllGatherDispatcher as AllGatherDispatcher,
    )
    from titan_moe.dispatch import (
        AllToAllDispatcher as AllToAllDispatcher,
    )
    from titan_moe.dispatch import (
        LocalDispatcher as LocalDispatcher,
    )
    from titan_moe.dispatch import (
        Routed as Routed,
    )
    from titan_moe.dispatch import (
        TokenDispatcher as TokenDispatcher,
    )
    from titan_moe.dispatch.base import Exchange as Exchange
    from titan_moe.dispatch.base import ExpertInputs as ExpertInputs
    from titan_moe.dispatch.base import Pending as Pending
    from titan_moe.dispatch.capacity import ExpertCapacity as ExpertCapacity
    from titan_moe.dispatch.symm_mem.dispatcher import SymmMemDispatcher as SymmMemDispatcher
    from titan_moe.dispatch.symm_mem.fused import SymmMemFusedDispatcher as SymmMemFusedDispatcher
    from titan_moe.dispatch.symm_mem.memory import (
        SymmMemory as SymmMemory,
    )
    from titan_moe.dispatch.symm_mem.memory import (
        close_symm_memory as close_symm_memory,
    )
    from titan_moe.dispatch.symm_mem.memory import (
        open_symm_memory as open_symm_memory,
    )
    from titan_moe.entry import check as check
    from titan_moe.entry import train as train
    from titan_moe.kernels.experts.weights import ExpertUse as ExpertUse
    from titan_moe.kernels.experts.weights import ExpertWeights as ExpertWeights
    from titan_moe.kernels.loss.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from titan_moe.kernels.router.routing import Routing as Routing
    from titan_moe.kernels.symm_mem.arrays import symm_bytes as symm_bytes
    from titan_moe.layers.attention import Context as Context
    from titan_moe.layers.block import Block as Block
    from titan_moe.layers.experts import GroupedExperts as GroupedExperts
    from titan_moe.layers.init import init_weights as init_weights
    from titan_moe.layers.moe import MoE as MoE
    from titan_moe.layers.replay import RoutingReplay as RoutingReplay
    from titan_moe.layers.router import TopKRouter as TopKRouter
    from titan_moe.models.transformer import Transformer as Transformer
    from titan_moe.parallel.balance import (
        scale_balancing_losses as scale_balancing_losses,
    )
    from titan_moe.parallel.balance import (
        update_expert_biases as update_expert_biases,
    )
    from titan_moe.parallel.dispatchers import register_dispatcher as register_dispatcher
    from titan_moe.parallel.expert import apply_expert_parallel as apply_expert_parallel

_MODULES = {
    "AdapterConfig": "titan_moe.config.adapter",
    "AdapterOfKind": "titan_moe.config.adapter",
    "AllGatherDispatcher": "titan_moe.dispatch",
    "AllToAllDispatcher": "titan_moe.dispatch",
    "AttentionConfig": "titan_moe.config.attention",
    "AuxLosses": "titan_moe.config.balance",
    "BatchPhase": "titan_moe.config.batch_schedule",
    "Block": "titan_moe.layers.block",
    "ChatConfig": "titan_moe.config.chat",
    "CheckpointConfig": "titan_moe.config.train",
    "CompileConfig": "titan_moe.config.perf",
    "Context": "titan_moe.layers.attention",
    "DataConfig": "titan_moe.config.train",
    "DispatcherFacts": "titan_moe.config.dispatchers",
    "Exchange": "titan_moe.dispatch.base",
    "ExpertCapacity": "titan_moe.dispatch.capacity",
    "ExpertInputs": "titan_moe.dispatch.base",
    "ExpertUse": "titan_moe.kernels.experts.weights",
    "ExpertWeights": "titan_moe.kernels.experts.weights",
    "GroupedExperts": "titan_moe.layers.experts",
    "HuggingFaceError": "titan_moe.checkpoint.hf_folder",
    "KernelOverrides": "titan_moe.config.kernels",
    "Kernels": "titan_moe.config.kernels",
    "LocalDispatcher": "titan_moe.dispatch",
    "MTPConfig": "titan_moe.config.mtp",
    "MemoryConfig": "titan_moe.config.perf",
    "MetricsConfig": "titan_moe.config.train",
    "MoE": "titan_moe.layers.moe",
    "MixtureSource": "titan_moe.config.mixture",
    "MoEConfig": "titan_moe.config.model",
    "ModelConfig": "titan_moe.config.model",
    "MuonConfig": "titan_moe.config.train",
    "OptimConfig": "titan_moe.config.train",
    "ParallelConfig": "titan_moe.config.parallel",
    "ParameterGroup": "titan_moe.config.parameter_groups",
    "Pending": "titan_moe.dispatch.base",
    "PerfConfig": "titan_moe.config.perf",
    "PrecisionConfig": "titan_moe.config.precision",
    "ProfileConfig": "titan_moe.config.train",
    "QKClipConfig": "titan_moe.config.train",
    "Recipe": "titan_moe.config.recipe",
    "RecipeError": "titan_moe.config.parse",
    "Routed": "titan_moe.dispatch",
    "Routing": "titan_moe.kernels.router.routing",
    "RoutingReplay": "titan_moe.layers.replay",
    "RunConfig": "titan_moe.config.train",
    "SymmMemDispatcher": "titan_moe.dispatch.symm_mem.dispatcher",
    "SymmMemFusedDispatcher": "titan_moe.dispatch.symm_mem.fused",
    "SymmMemory": "titan_moe.dispatch.symm_mem.memory",
    "Table": "titan_moe.config.schema",
    "TokenDispatcher": "titan_moe.dispatch",
    "TopKRouter": "titan_moe.layers.router",
    "TrainConfig": "titan_moe.config.train",
    "Transformer": "titan_moe.models.transformer",
    "UpcycleConfig": "titan_moe.config.upcycle",
    "ValidationConfig": "titan_moe.config.train",
    "apply_expert_parallel": "titan_moe.parallel.expert",
    "check": "titan_moe.entry",
    "close_symm_memory": "titan_moe.dispatch.symm_mem.memory",
    "hf_weights": "titan_moe.checkpoint.hf_stream",
    "init_weights": "titan_moe.layers.init",
    "linear_cross_entropy": "titan_moe.kernels.loss.cross_entropy",
    "load_hf": "titan_moe.checkpoint.hf",
    "load_recipe": "titan_moe.config.parse",
    "open_symm_memory": "titan_moe.dispatch.symm_mem.memory",
    "register_dispatcher": "titan_moe.parallel.dispatchers",
    "save_hf": "titan_moe.checkpoint.hf",
    "scale_balancing_losses": "titan_moe.parallel.balance",
    "symm_bytes": "titan_moe.kernels.symm_mem.arrays",
    "train": "titan_moe.entry",
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
