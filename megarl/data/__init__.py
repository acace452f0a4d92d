"""Prompts: where they come from and how they are rendered."""
