"""The formats of routed experts that have kernels: a row for each."""

from titan_moe.kernels.experts.format import ExpertFormat
from titan_moe.kernels.experts.fp8 import format as fp8
from titan_moe.kernels.experts.plain import PLAIN

FORMATS: dict[str, ExpertFormat] = {format.name: format for format in (PLAIN, *fp8.FORMATS)}
"""By the name that operations take."""
COMPUTE = PLAIN.name
"""Rows in the dtype of compute."""
