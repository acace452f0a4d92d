"""Turns stop signals to the processes of a phase into requests to finish the current work, save it and exit."""

from __future__ import annotations

import signal
import sys

import torch
import torch.distributed as dist

from megarl.errors import STOP_SIGNALS, STOPPED


class StopRequest:
    """From its construction on, `STOP_SIGNALS` no longer end this process but set ``asked`` to True."""

    def __init__(self) -> None:
        self.asked = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _remember(self, *_: object) -> None:
        self.asked = True

    def exit_if_asked(self) -> None:
        """Exit if a stop was asked for; call it where there is nothing to save."""
        if self.asked:
            sys.exit(STOPPED)

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop; the same on all ranks, which signals reach at different updates.

        Collective.
        """
        asked = torch.tensor(float(self.asked), device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)
