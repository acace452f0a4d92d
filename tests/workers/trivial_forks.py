"""A warm process whose forks end at once, with the exit code that their order names."""

import ctypes
import functools
import os
import socket
import sys

from megarl.workers.warm import WarmProcess

WAIT_MILLISECONDS = 300


class TrivialForks(WarmProcess):
    def run_child(self, process):
        return int(process["code"])


class WaitsFirst:
    """A socket whose ``fileno`` returns only after a while or when a signal arrives; `select` calls it before it waits.

    So the signal comes just before the wait. ``fileno`` is all C, so that Python cannot run the handler before it.
    """

    def __init__(self, end):
        self.end = end
        poll = ctypes.CDLL(None).poll
        poll.restype = functools.partial(max, end.fileno())
        self.fileno = functools.partial(poll, None, 0, WAIT_MILLISECONDS)

    def __getattr__(self, name):
        return getattr(self.end, name)


if __name__ == "__main__":
    os.dup2(os.open(os.environ["FORKS_LOG"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    agent = socket.socket(fileno=int(sys.argv[1]))
    server = TrivialForks(WaitsFirst(agent) if "WAITS_FIRST" in os.environ else agent)
    server.generation = iter(())
    server.serve()
