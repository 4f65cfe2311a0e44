"""Formats of GEMMs: transforms of a built model."""
