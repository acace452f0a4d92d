"""Everything on disk that survives a kill: the run directory, rollouts, policies, checkpoints, metrics."""
