"""A live stage: trainers and rollout workers at the same time over one store."""
