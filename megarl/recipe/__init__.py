"""Recipes: their tables and keys, reading and checking recipe files, schedules, parallel layouts. Imports no torch."""

from megarl.recipe.load import dump_recipe, load_recipe, override_recipe, parse_recipe, recipe_diff
from megarl.recipe.tables import Recipe

__all__ = ["Recipe", "dump_recipe", "load_recipe", "override_recipe", "parse_recipe", "recipe_diff"]
