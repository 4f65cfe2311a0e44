"""Dtypes and formats of training: `[precision]` of a recipe."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bf16", "fp32", "fp64"]
BYTES_OF_DTYPE: dict[Dtype, int] = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class PrecisionConfig:
    """The dtypes of training. Norms, router, scores, softmax and loss are computed in fp32 or higher."""

    compute: Dtype = "bf16"
    """Parameters and activations in forward and backward."""
    master: Dtype = "fp32"
    """Parameters in the optimizer, and the gradients that it reads."""
    reduce: Dtype = "fp32"
    """Gradients in reductions over ranks."""
    moments: Literal["master", "bf16", "fp32"] = "master"
    """AdamW's two moments. A dtype other than that of `master` needs optim.kind = "fused_adamw".
    `master`: The dtype of `master`.
    `bf16`: bf16, with stochastic rounding.
    `fp32`: fp32."""

    @property
    def moments_dtype(self) -> Dtype:
        """The dtype of the moments."""
        return self.master if self.moments == "master" else self.moments
