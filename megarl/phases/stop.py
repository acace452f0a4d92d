"""SIGTERM to the processes of a phase: a request to save and stop, on which all ranks agree between two updates."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist


class StopRequest:
    """From its construction on SIGTERM does not end this process, it is only remembered."""

    def __init__(self) -> None:
        self._asked = False
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, *_: object) -> None:
        self._asked = True

    def agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop. Collective: the signal reaches ranks, and nodes, at different updates."""
        asked = torch.tensor(float(self._asked), device=device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)
