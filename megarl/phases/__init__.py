"""The code that the processes of a phase run: a module per phase, with a function of the phase's name."""
