"""A warm process whose forks end at once with the code they are told."""

import os
import socket
import sys

from megarl.workers.warm import WarmProcess


class TrivialForks(WarmProcess):
    def run_child(self, process):
        return int(process["code"])


if __name__ == "__main__":
    server = TrivialForks(socket.socket(fileno=int(sys.argv[1])))
    server.generation = iter(())
    os.environ.pop("PYTHONUNBUFFERED", None)
    server.serve()
