"""Activation memory: each file is one transform of a built model."""
