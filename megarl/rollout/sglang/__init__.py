"""SGLang: a server of its own on loopback, and the engine that speaks to it."""
