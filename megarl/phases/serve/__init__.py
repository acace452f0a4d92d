"""A rollout phase that agents fill: an OpenAI-compatible server, on loopback, in front of the engine of a stage."""

KEY = "serve.key"  # file in the run directory with the API key that clients must send
