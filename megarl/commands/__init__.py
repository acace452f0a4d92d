"""What a person starts: whole runs, one phase, exports and evaluations, what-if, sweeps, packed and served stages."""
