"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a stage trains candidates whose responses differ in reward.

A group whose responses all have the same reward has advantages of 0 and teaches nothing.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Sequence

import numpy as np

from megarl.advantages import zero_variance
from megarl.distributed import ReplicaGroup
from megarl.phases.scoring import ScoredGroup
from megarl.storage.rollouts import Response, RolloutStore

LOOK_SECONDS = 0.2  # between two looks at what other replicas tell while responses are being decoded


class Choice:
    """The first ``wanted`` candidates with variance, in id order. If there are too few, the first groups
    without variance complete the choice.

    So it depends on the candidates alone: not on which of several replicas was faster or which was killed, and groups
    with long responses are chosen as often as those with short ones.
    """

    def __init__(self, candidates: range, wanted: int) -> None:
        self.candidates, self.wanted = candidates, wanted
        self.varies: dict[int, bool] = {}  # of the candidates that are known
        self._first: list[int] = []  # heap of minus the ids of the first ``wanted`` with variance
        self._unknown = candidates.start  # the first that is not known

    def add(self, group: int, varies: bool) -> None:
        """Record whether a candidate has variance; recording it twice changes nothing."""
        if group in self.varies:
            return
        self.varies[group] = varies
        if varies and len(self._first) < self.wanted:
            heapq.heappush(self._first, -group)
        elif varies:
            heapq.heappushpop(self._first, -group)
        while self._unknown in self.varies:
            self._unknown += 1

    @property
    def end(self) -> int:
        """No candidate from this id on will be chosen, whatever those that are not known turn out to be."""
        return 1 - self._first[0] if len(self._first) == self.wanted else self.candidates.stop

    @property
    def is_final(self) -> bool:
        """Nothing that is not known can change the choice."""
        return self._unknown >= self.end

    def chosen(self) -> list[int]:
        """The choice, in id order."""
        with_variance = [-minus for minus in self._first]
        others = sorted(group for group, varies in self.varies.items() if not varies)
        return sorted(with_variance + others[: self.wanted - len(with_variance)])


class Candidates:
    """The choice of a stage, as replicas tell each other of the groups that they have generated.

    With as many candidates as groups are wanted there is nothing to choose, and nothing is published.
    """

    def __init__(self, replicas: ReplicaGroup, candidates: range, wanted: int) -> None:
        self._store = replicas.store
        self._choice = Choice(candidates, wanted)
        self.chooses = wanted < len(candidates)
        self._read = 0  # messages
        self._next_look = 0.0

    def recall(self, store: RolloutStore) -> None:
        """Publish the groups that an earlier attempt stored."""
        if self.chooses:
            for number in store.group_ids:  # one at a time: the store keeps few shards open
                (group,) = store.read([number])
                self._choice.add(number, _varies(group.responses))
            self._tell(self._choice.varies)

    def add(self, group: ScoredGroup) -> None:
        """Publish a group before it is stored. If storing fails, the phase does too, and starts again from the disk."""
        if self.chooses:
            self._tell({group.seeded.number: _varies(group.responses)})

    def _tell(self, varies: dict[int, bool]) -> None:
        number = self._store.add("candidates", 1) - 1
        self._store.set(f"candidates/{number}", json.dumps(list(varies.items())))

    def _look(self) -> None:
        while self.chooses and self._store.check([f"candidates/{self._read}"]):
            for group, varies in json.loads(self._store.get(f"candidates/{self._read}")):
                self._choice.add(group, varies)
            self._read += 1

    def may_be_chosen(self, chunk: Sequence[int]) -> bool:
        """Whether any group of a chunk can still be part of the choice; if not, none of a later chunk can."""
        self._look()
        return chunk[0] < self._choice.end

    def are_enough(self) -> bool:
        """Whether the choice is made before all candidates are known. Cheap enough for every decoding step."""
        if not self.chooses or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + LOOK_SECONDS
        self._look()
        return self._choice.is_final

    def chosen(self) -> list[int] | None:
        """Once everybody is done: the groups to train; None: all of them."""
        self._look()
        return self._choice.chosen() if self.chooses else None

    def summary(self) -> dict[str, int]:
        """For events.jsonl, once everybody is done."""
        known, wanted = self._choice.varies, self._choice.wanted
        with_variance = sum(known.values())
        return {
            "candidates": len(self._choice.candidates),
            "generated": len(known),
            "with_variance": with_variance,
            "chosen": wanted,
            "filled": max(0, wanted - with_variance),
        }


def _varies(responses: Sequence[Response]) -> bool:
    return not bool(zero_variance(np.array([[response.reward for response in responses]])))
