"""The rollout engine that runs SGLang as a separate server on loopback."""
