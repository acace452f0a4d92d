"""SIGTERM to the processes of a phase: a request to finish what is begun, save it and exit."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist


class StopRequest:
    """From its construction on SIGTERM does not end this process: ``asked`` becomes True."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._remember)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _remember(self, *_: object) -> None:
        self.asked = True

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked. Collective: the signal reaches ranks, and nodes, at different updates."""
        asked = torch.tensor(float(self.asked), device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)
