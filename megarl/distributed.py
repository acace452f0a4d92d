"""How the processes of a phase find each other: their process group, or the key-value store that they share."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megarl.heartbeats import WAITS, beat

# environment variable: the store of one attempt at a phase, the path of a file or on several nodes "address:port"
STORE = "MEGARL_STORE"
PATIENCE = "MEGARL_PATIENCE"  # environment variable: timeout of a collective, in seconds
POLL_SECONDS = 0.02
CONNECT_SECONDS = 60.0


@dataclass(frozen=True)
class Role:
    """The rank of a process among the processes of its kind, in a phase with several kinds (trainers and workers)."""

    name: str
    rank: int
    size: int


def collective_timeout() -> timedelta:
    """Timeout of a collective: longer than the limit of the node agent's watch (`megarl.workers.watch`), which should
    act first because it can tell which process is stuck."""
    return timedelta(seconds=float(os.environ.get(PATIENCE, "86400")))


def join_process_group(backend: str, role: Role | None = None) -> dist.Store:
    """Call init_process_group with the launcher's environment; returns a store that all processes of the phase share.

    role: where given, the processes of each role form a process group of their own, which is torch's world for them.
    """
    phase, name = _phase_store(), "torch" if role is None else f"torch/{role.name}"
    rank, size = _rank_and_size(role)
    beat("meeting of the ranks", "")
    dist.init_process_group(
        backend, store=dist.PrefixStore(name, phase), rank=rank, world_size=size, timeout=collective_timeout()
    )
    return dist.PrefixStore("megarl", phase)


@dataclass(frozen=True)
class ReplicaGroup:
    """Engine replicas: processes that exchange counters and JSON values through a store, but no tensors.

    They have no torch process group, because each engine creates one of its own, which other replicas must not join.
    The ``name`` of an exchange is its key in the store, so it must be unique within a phase.
    """

    store: dist.Store
    rank: int
    world: int
    while_waiting: Callable[[], None] = lambda: None  # called at each poll for another replica; may exit the process

    @classmethod
    def join(cls, role: Role | None = None, while_waiting: Callable[[], None] = lambda: None) -> ReplicaGroup:
        return cls(dist.PrefixStore("megarl", _phase_store()), *_rank_and_size(role), while_waiting)

    def gather(self, name: str, value: Any) -> list[Any]:
        """All-gather: the values of all replicas, in rank order. Each is serialised as JSON."""
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        return [self._wait_for(f"{name}/{rank}") for rank in range(self.world)]

    def from_first(self, name: str, value: Any) -> Any:
        """Broadcast: rank 0's value, on every replica; other ranks' ``value`` is ignored. Serialised as JSON."""
        if self.rank == 0:
            self.store.set(name, json.dumps(value))
        return self._wait_for(name)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of ``compute``, which only the first replica to call this runs. Serialised as JSON."""
        if self.store.add(f"{name}/asked", 1) == 1:
            self.store.set(name, json.dumps(compute()))
        return self._wait_for(name)

    def barrier(self, name: str) -> None:
        self.gather(name, None)

    def _wait_for(self, key: str) -> Any:
        while not self.store.check([key]):
            beat(WAITS, f"wait for other replicas ({key})")
            self.while_waiting()
            time.sleep(POLL_SECONDS)  # not a blocking `get`, during which Python would handle no signal
        return json.loads(self.store.get(key))


def _rank_and_size(role: Role | None) -> tuple[int, int]:
    return (role.rank, role.size) if role else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _phase_store() -> dist.Store:
    """The store of all processes of this attempt at a phase; a private one for a single process."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if STORE not in os.environ:
        return dist.HashStore()
    return _open_store(os.environ[STORE])


@functools.cache  # torch keeps only the C++ half of a store alive
def _open_store(place: str) -> dist.Store:
    store: dist.Store
    if place.startswith("/"):
        store = dist.FileStore(place)
    else:
        address, _, port = place.rpartition(":")
        limit = timedelta(seconds=CONNECT_SECONDS)
        store = dist.TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    store.set_timeout(collective_timeout())
    return store


def become_single_process() -> None:
    """Set the environment variables of a phase with a single process, for scripts and benchmarks."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
