"""Recipes as plain data: standard library only, no torch."""

from titan_moe.config.recipe import Recipe

__all__ = ["Recipe"]
