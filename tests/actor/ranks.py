"""Starts the ranks of a test as forks of one process that has imported torch, Megatron and transformers once."""

import os
import time
from multiprocessing import forkserver
from unittest import mock

import torch
import torch.multiprocessing

from tests.fork_servers import RANKS, functions


def run_ranks(function, arguments, ranks, timeout=900):
    """Run ``function(rank, *arguments)`` in each of ``ranks`` processes; raises the error of the first that fails."""
    with mock.patch.multiple(forkserver, **functions(RANKS)):
        started = torch.multiprocessing.start_processes(
            run_rank, (function, tuple(arguments)), ranks, join=False, start_method="forkserver"
        )
    deadline = time.monotonic() + timeout
    while not started.join(timeout=1):
        if time.monotonic() > deadline:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"{ranks} ranks of {function.__name__} did not end within {timeout} s")


def run_rank(rank, function, arguments):
    prepare()
    function(rank, *arguments)


def prepare():
    """Set one thread, gloo over loopback, and Megatron on the CPU; changes nothing where the parent process did so."""
    from megarl.actor import cpu_backend

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cpu_backend.install()
