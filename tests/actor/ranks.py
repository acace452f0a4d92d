"""Starts the ranks of a test as forks of one process that has imported torch, Megatron and transformers once."""

import multiprocessing
import os
import time

import torch
import torch.multiprocessing

PRELOADED = ["tests.actor.preloaded", "megarl.phases.optimize", "tests.actor.hf_worker", "tests.actor.layout_ranks"]


def run_ranks(function, arguments, ranks, timeout=900):
    """``function(rank, *arguments)`` in each of ``ranks`` processes; raises what the first of them to fail raised."""
    multiprocessing.set_forkserver_preload(PRELOADED)
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
    """One thread, gloo over loopback, Megatron on the CPU: where the fork has it already this does nothing."""
    from megarl.actor import cpu_backend

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cpu_backend.install()
