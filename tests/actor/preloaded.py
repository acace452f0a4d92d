"""Imported first by the process that ranks are forked from: the CPU backend must come before the rest of Megatron."""

import sys
from pathlib import Path

from tests.actor.ranks import prepare

sys.path.append(str(Path(__file__).parent / "deep_ep_stand_in"))
prepare()
