"""How the processes of a phase find each other."""

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

from megarl.beats import WAITS, beat
from megarl.keystore import SECRET, StoreClient

PHASE_ID = "MEGARL_PHASE_ID"  # environment variable: what one attempt at a phase calls its keys in the agents' store
PATIENCE = "MEGARL_PATIENCE"  # environment variable: seconds after which a collective fails by itself
POLL_SECONDS = 0.02
CONNECT_SECONDS = 60.0


@dataclass(frozen=True)
class Role:
    """A process's place among those of its kind, where a phase has several kinds."""

    name: str
    rank: int
    size: int


def patience() -> timedelta:
    """How long a collective may take: longer than the node agent lets it, which knows more (`megarl.workers.watch`)."""
    return timedelta(seconds=float(os.environ.get(PATIENCE, "86400")))


def join_process_group(backend: str, role: Role | None = None) -> dist.Store:
    """init_process_group from the launcher's environment; returns a store that all processes of the phase share.

    role: the processes of each kind get a group of their own, which then is what torch calls the world.
    """
    phase, name = _phase_store(), "torch"
    if role is None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        name, rank, size = f"torch/{role.name}", role.rank, role.size
    beat("meeting of the ranks", "")
    dist.init_process_group(
        backend, store=dist.PrefixStore(name, phase), rank=rank, world_size=size, timeout=patience()
    )
    return dist.PrefixStore("megarl", phase)


@dataclass(frozen=True)
class ReplicaGroup:
    """Processes that share a counter and a few values, but no tensors: engine replicas.

    Without a process group, since an engine makes one of its own, in which the replicas must not meet. ``name``: the
    key in the store, another one for each exchange of a phase.
    """

    store: dist.Store
    rank: int
    world: int
    leave: Callable[[], None] = lambda: None  # called again and again while one waits for the others; may exit

    @classmethod
    def join(cls, role: Role | None = None, leave: Callable[[], None] = lambda: None) -> ReplicaGroup:
        store = dist.PrefixStore("megarl", _phase_store())
        if role is not None:
            return cls(store, role.rank, role.size, leave)
        return cls(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), leave)

    def gather(self, name: str, value: Any) -> list[Any]:
        """Everybody's value, rank by rank, to everybody. JSON."""
        self.store.set(f"{name}/{self.rank}", json.dumps(value))
        return [self._wait_for(f"{name}/{rank}") for rank in range(self.world)]

    def from_first(self, name: str, value: Any) -> Any:
        """Rank 0's value, to everybody. JSON."""
        if self.rank == 0:
            self.store.set(name, json.dumps(value))
        return self._wait_for(name)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of whoever comes first, to everybody who asks. JSON."""
        if self.store.add(f"{name}/asked", 1) == 1:
            self.store.set(name, json.dumps(compute()))
        return self._wait_for(name)

    def barrier(self, name: str) -> None:
        self.gather(name, None)

    def _wait_for(self, key: str) -> Any:
        while not self.store.check([key]):
            beat(WAITS, f"a wait for others ({key})")
            self.leave()
            time.sleep(POLL_SECONDS)  # in Python, so that a signal is handled meanwhile
        return json.loads(self.store.get(key))


def _phase_store() -> dist.Store:
    """The launcher's agent hosts it; a process that is a whole phase by itself shares it with nobody."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if PHASE_ID not in os.environ:
        return dist.HashStore()
    store = _agents_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ[SECRET])
    return dist.PrefixStore(os.environ[PHASE_ID], store)


@functools.cache  # torch keeps only the C++ half of a store alive
def _agents_store(address: str, port: int, secret: str) -> dist.Store:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return StoreClient(address, port, bytes.fromhex(secret), patience())
        except OSError:  # the agent is there, since this process ends with it, but its machine may be busy
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


def become_single_process() -> None:
    """Prepare the environment of a process that is a whole phase by itself: scripts and benchmarks."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
