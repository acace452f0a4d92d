"""The messages between the trainers and the rollout workers of a live stage, through the key-value store they share."""

from __future__ import annotations

from typing import Literal, cast

import torch.distributed as dist

Decision = Literal["wait", "train", "stop"]
NO_VERSION = 1 << 62  # later than any version: announced by an engine that will not load another one


class LiveState:
    """Keys of one attempt at a live stage; the next attempt begins with an empty state."""

    def __init__(self, store: dist.Store, workers: int) -> None:
        self._store, self._workers = store, range(workers)

    def publish(self, version: int) -> None:
        """Trainers: announce that ``version`` is the newest one that can be loaded."""
        self._store.set("newest", str(version))

    def newest(self) -> int | None:
        """The newest published version; None until the trainers have found out from which version they continue."""
        return self._number("newest")

    # --- trainers among themselves: a collective would use the devices on which engines may be at work ---

    def decide(self, update: int, decision: Decision) -> None:
        """First trainer: say what all trainers do about an update."""
        self._store.set(f"update/{update}", decision)

    def decision(self, update: int) -> Decision | None:
        """The last decision about an update."""
        key = f"update/{update}"
        return cast(Decision, self._store.get(key).decode()) if self._store.check([key]) else None

    def ask_stop(self) -> None:
        """Trainer: report that it was asked to stop."""
        self._store.set("stop", "1")

    def stop_asked(self) -> bool:
        return self._store.check(["stop"])

    def give(self, update: int) -> None:
        """Trainer: announce that it has given back the memory that it can do without while it waits for an update."""
        self._store.add(f"given/{update}", 1)

    def given(self, update: int) -> int:
        """How many trainers have."""
        return self._number(f"given/{update}") or 0

    # --- all ---

    def take(self) -> int:
        """Take the next chunk; returns its number, from 0. No two engines get the same one."""
        return self._store.add("next_chunk", 1) - 1

    def announce(self, worker: int, version: int) -> None:
        """Engine: announce, before loading ``version``, that it will never load an older one again."""
        self._store.set(f"using/{worker}", str(version))

    def oldest_in_use(self) -> int:
        """The oldest version that an engine may still load; 0 until all engines have announced one."""
        return min(self._number(f"using/{worker}") or 0 for worker in self._workers)

    # --- taking turns on the same devices: in each round first the engines, then the trainers ---

    def begin_turns(self) -> None:
        """Trainers: announce that they hold all the memory that they keep during the engines' turns."""
        self._store.set("turns", "1")

    def turns_begun(self) -> bool:
        """Whether engines may start, which measure the free memory then."""
        return self._store.check(["turns"])

    def round(self) -> int:
        """The number of the current round, from 0."""
        return self._number("round") or 0

    def next_round(self) -> None:
        """Trainers: begin the next round, so that the engines run, because no stored groups are left to train."""
        self._store.set("round", str(self.round() + 1))

    def rest(self, worker: int, number: int) -> None:
        """Engine: announce that it sleeps in round ``number`` and leaves the devices to the trainers."""
        self._store.set(f"resting/{worker}", str(number + 1))

    def leave(self, worker: int) -> None:
        """Engine: announce that it is done with the stage and needs neither versions nor devices any more."""
        self.announce(worker, NO_VERSION)
        self.rest(worker, NO_VERSION)

    def all_rest(self) -> bool:
        """Whether all engines sleep in this round, so that it is the trainers' turn."""
        return min(self._number(f"resting/{worker}") or 0 for worker in self._workers) > self.round()

    def _number(self, key: str) -> int | None:
        return int(self._store.get(key)) if self._store.check([key]) else None
