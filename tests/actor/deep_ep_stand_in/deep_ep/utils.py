import torch


class EventHandle: ...


class EventOverlap:
    """The end of a kernel that fills the tensors it was given by `later`."""

    def __init__(self, event=None, extra_tensors=None):
        self._pending = []

    def later(self, values):
        """NaN in the place of values that are there only after `current_stream_wait`."""
        self._pending.append((torch.full_like(values, torch.nan), values))
        return self._pending[-1][0]

    def current_stream_wait(self):
        for place, values in self._pending:
            place.copy_(values)
