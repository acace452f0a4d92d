"""The phase of a live stage: trainers and rollout workers run at the same time and share one rollout store."""
