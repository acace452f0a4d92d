"""How the processes of a phase find each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist

# A fast replica may wait for hours for a slow one; a dead one is the launcher's business.
PATIENCE = timedelta(days=7)


def join_process_group(backend: str) -> dist.Store:
    """init_process_group from the launcher's environment; returns the store that all processes of the phase share.

    On one machine nothing listens beyond loopback; between nodes torch's own rendezvous is used.
    """
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=PATIENCE)
        return dist.PrefixStore("megarl", dist.distributed_c10d._get_default_store())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    port = int(os.environ["MASTER_PORT"])
    # TCPStore would bind to every interface, so it is handed a socket that is bound to loopback
    listener = socket.create_server(("127.0.0.1", port)).detach() if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=PATIENCE, master_listen_fd=listener)
    dist.init_process_group(
        backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=world, timeout=PATIENCE
    )
    return dist.PrefixStore("megarl", store)


def become_single_process() -> None:
    """Prepare the environment of a process that is a whole phase by itself: scripts and benchmarks."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
