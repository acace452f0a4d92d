"""A signal to the processes of a phase is a request to finish what is begun, save it and exit."""

from __future__ import annotations

import signal
import sys

import torch
import torch.distributed as dist

from megarl.errors import STOP_SIGNALS, STOPPED


class StopRequest:
    """From its construction on `STOP_SIGNALS` do not end this process: ``asked`` becomes True."""

    def __init__(self) -> None:
        self.asked = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _remember(self, *_: object) -> None:
        self.asked = True

    def exit_if_asked(self) -> None:
        """For processes with nothing left to save."""
        if self.asked:
            sys.exit(STOPPED)

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked. Collective: the signal reaches ranks, and nodes, at different updates."""
        asked = torch.tensor(float(self.asked), device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)
