"""Tests of whole runs have the fixtures of `support.runs`."""

from support.runs import make_run, one_process, tiny

__all__ = ["make_run", "one_process", "tiny"]
