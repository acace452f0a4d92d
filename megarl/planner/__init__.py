"""What a run will take before it runs: memory, disk and time of a recipe (``megarl plan``, ``megarl simulate``).

`preflight` says whether it can run.
"""
