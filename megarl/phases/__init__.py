"""What the processes of a phase run: one module a phase, each with a function of its name."""
