"""Imported first by the process that ranks are forked from: the CPU backend must come before the rest of Megatron."""

from tests.actor.ranks import prepare

prepare()
