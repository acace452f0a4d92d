"""Responses of a run as people look at them: found in the store, shown in a terminal, as JSON and in the report."""

COLOURINGS = ("ratio", "kept", "entropy", "logprob")  # by what tokens are coloured
