"""torchao, imported where a recipe needs it: linear layers in fp8, and moments in 8 bits. It takes seconds."""

import importlib
import os

import torch

from titan_moe.config import RecipeError

TORCHAO = "torchao>=0.17,<0.19"
"""As in pyproject.toml."""


def require_torchao(setting: str, way_out: str = "compute", module: str = "torchao.float8") -> None:
    """Import torchao for a setting of the recipe, such as `precision.linears = "fp8_tensorwise"`.

    `way_out` is a value of the field that needs no torchao.

    Raises: RecipeError with the way to install it.
    """
    if not torch.cuda.is_available():
        # its libraries hold kernels for GPUs, and warn elsewhere
        os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    try:
        importlib.import_module(module)
    except ImportError as error:
        key = setting.partition(" ")[0]
        raise RecipeError(
            [
                f"{setting} needs torchao, which cannot be imported ({error}); install it with pip install "
                f'"{TORCHAO}", or take {key} = "{way_out}"'
            ]
        ) from error
