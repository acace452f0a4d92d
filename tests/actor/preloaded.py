"""Imported first by the process from which ranks are forked: the CPU backend comes before the rest of Megatron."""

from tests.actor.ranks import prepare

prepare()
