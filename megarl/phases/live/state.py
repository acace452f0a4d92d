"""What the trainers and the rollout service of a live stage tell each other, through the store they share."""

from __future__ import annotations

import torch.distributed as dist

NO_VERSION = 1 << 62  # later than any policy: announced by an engine that will load none any more


class LiveState:
    """Keys of one attempt at a live stage; the next attempt begins with an empty state."""

    def __init__(self, store: dist.Store, workers: int) -> None:
        self._store, self._workers = store, range(workers)

    def publish(self, version: int) -> None:
        """The trainers: ``version`` is the newest that can be loaded."""
        self._store.set("newest", str(version))

    def newest(self) -> int | None:
        """The newest published version; None until the trainers know where they continue."""
        return self._number("newest")

    def take(self) -> int:
        """The number of the next chunk, from 0: each goes to one engine."""
        return self._store.add("next_chunk", 1) - 1

    def announce(self, worker: int, version: int) -> None:
        """An engine, before it loads ``version``: it will never load an older one."""
        self._store.set(f"using/{worker}", str(version))

    def oldest_in_use(self) -> int:
        """No engine will load an older version. 0 until all engines have announced one."""
        return min(self._number(f"using/{worker}") or 0 for worker in self._workers)

    # --- taking turns on the same devices: in each round first the engines, then the trainers ---

    def round(self) -> int:
        return self._number("round") or 0

    def next_round(self) -> None:
        """The trainers have nothing left to train: the engines' turn."""
        self._store.set("round", str(self.round() + 1))

    def rest(self, worker: int, number: int) -> None:
        """An engine sleeps until a later round."""
        self._store.set(f"resting/{worker}", str(number + 1))

    def leave(self, worker: int) -> None:
        """An engine is done with the stage."""
        self.announce(worker, NO_VERSION)
        self.rest(worker, NO_VERSION)

    def all_rest(self) -> bool:
        """Whether no engine is awake in this round: the trainers' turn."""
        return min(self._number(f"resting/{worker}") or 0 for worker in self._workers) > self.round()

    def _number(self, key: str) -> int | None:
        return int(self._store.get(key)) if self._store.check([key]) else None
