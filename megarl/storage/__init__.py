"""What survives a kill: durable files, the run directory, rollouts, policies, metrics."""
