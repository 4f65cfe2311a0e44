"""Recipes as plain data: what a run may say, how it is read, which rules it keeps. Standard library only, no torch."""

from titan_moe.config.parse import RecipeError, dump_recipe, load_recipe
from titan_moe.config.recipe import Recipe
from titan_moe.config.rules import RULES, Rule, check_rules
from titan_moe.config.ways_out import refusals

__all__ = ["RULES", "Recipe", "RecipeError", "Rule", "check_rules", "dump_recipe", "load_recipe", "refusals"]
