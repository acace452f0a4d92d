"""A rollout phase that agents fill: an OpenAI-compatible server on loopback in front of the engine of a stage."""

KEY = "serve.key"  # in the run directory: what clients send as their API key
