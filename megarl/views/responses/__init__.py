"""Responses of a run for people: found in the store, and shown in a terminal, as JSON and in the report."""

COLOURINGS = ("ratio", "kept", "entropy", "logprob")  # quantities by which tokens can be coloured
