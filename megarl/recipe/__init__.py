"""Recipes: their tables and keys, reading and checking recipe files, schedules, parallel layouts. Imports no torch."""
