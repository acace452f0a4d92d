"""Prompts: reading them from files and generators, and rendering them as tokens."""
