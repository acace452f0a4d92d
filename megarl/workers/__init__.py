"""Starts the processes of phases on every node and watches them."""
