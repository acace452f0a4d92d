"""The staleness lab: sweeps on tiny models, what came of them, and which claims of the papers it bears out."""
