"""A warm process whose forks end at once with the code they are told."""

import os
import socket
import sys

from megarl.workers.warm import WarmProcess


class TrivialForks(WarmProcess):
    def run_child(self, process):
        return int(process["code"])


if __name__ == "__main__":
    os.dup2(os.open(os.environ["FORKS_LOG"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    server = TrivialForks(socket.socket(fileno=int(sys.argv[1])))
    server.generation = iter(())
    server.serve()
