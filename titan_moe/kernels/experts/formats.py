"""The formats of routed experts that have kernels: a row for each."""

from dataclasses import replace

from titan_moe.config.swiglu import SwiGLU
from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fp8 import format as fp8
from titan_moe.kernels.experts.plain import BIASED, PLAIN


class _Formats(dict[str, ExpertFormat]):
    """Formats by name. One with another activation is made when its name comes first."""

    def __missing__(self, name: str) -> ExpertFormat:
        of_gemms, *numbers = name.rsplit(" ", len(SwiGLU._fields))
        if len(numbers) != len(SwiGLU._fields) or of_gemms not in self:
            raise KeyError(name)
        self[name] = replace(self[of_gemms], activation=SwiGLU(*map(float, numbers)))
        return self[name]


FORMATS = _Formats({format.name: format for format in (PLAIN, BIASED, *fp8.FORMATS)})
"""By the name that operations take."""
COMPUTE = PLAIN.name
"""Rows in the dtype of compute."""
