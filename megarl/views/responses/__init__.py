"""Responses of a run for people: found in the store, and shown in a terminal or as JSON."""

COLOURINGS = ("ratio", "kept", "entropy", "logprob")  # quantities by which tokens can be coloured
