"""Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a stage trains groups whose rewards have variance.

If all responses of a group have the same reward, its advantages are 0 and nothing is learnt from it. So a stage has
more candidates, groups that may be generated, than it trains. In a live run there is such a choice for the updates
between two policy versions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from megarl.advantages import zero_variance
from megarl.distributed import ReplicaGroup
from megarl.storage.rollouts import Group, RolloutStore


class Choice:
    """The first ``wanted`` candidates with variance in their rewards, in id order.

    If there are too few, the first groups without variance fill the choice up. So the choice depends only on the
    candidates: not on which replica was faster or was killed, and long responses are as likely to be chosen as short
    ones. A candidate is known once `add` was called for it.
    """

    def __init__(self, candidates: range, wanted: int) -> None:
        self.candidates, self.wanted = candidates, wanted
        self.varies: dict[int, bool] = {}  # id of each known candidate -> whether its rewards have variance

    def add(self, group: int, varies: bool) -> None:
        """Record whether a candidate's rewards have variance; a second call for the same candidate changes nothing."""
        self.varies.setdefault(group, varies)

    def _first(self) -> list[int]:
        """The first ``wanted`` known candidates with variance, in id order."""
        return sorted(group for group, varies in self.varies.items() if varies)[: self.wanted]

    @property
    def end(self) -> int:
        """No candidate with this id or a larger one will be chosen, whatever the unknown candidates turn out to be."""
        first = self._first()
        return first[-1] + 1 if len(first) == self.wanted else self.candidates.stop

    @property
    def is_final(self) -> bool:
        """Whether no unknown candidate can change the choice."""
        return self.varies.keys() >= set(range(self.candidates.start, self.end))

    def chosen(self) -> list[int]:
        """The ids of the chosen groups, sorted."""
        first, others = self._first(), sorted(group for group, varies in self.varies.items() if not varies)
        return sorted(first + others[: self.wanted - len(first)])


class Candidates:
    """A `Choice` that replicas share: each publishes in the store which groups it has generated.

    If there are only as many candidates as ``wanted`` groups, there is nothing to choose, and nothing is published.
    """

    def __init__(self, replicas: ReplicaGroup, candidates: range, wanted: int) -> None:
        self._store = replicas.store
        self._key = f"candidates/{candidates.start}"
        self._choice = Choice(candidates, wanted)
        self.chooses = wanted < len(candidates)
        self._read = 0  # number of messages read

    def publish_stored(self, store: RolloutStore) -> None:
        """Publish the groups that an earlier attempt at the phase stored."""
        if self.chooses:
            add_stored(self._choice, store)
            self._publish(self._choice.varies)

    def add(self, group: Group) -> None:
        """Publish a group. It need not be stored yet: if storing fails, so does the phase, which restarts from disk."""
        if self.chooses:
            self._publish({group.group_id: has_variance(group)})

    def _publish(self, varies: dict[int, bool]) -> None:
        number = self._store.add(self._key, 1) - 1
        self._store.set(f"{self._key}/{number}", json.dumps(list(varies.items())))

    def _poll(self) -> None:
        while self.chooses and self._store.check([f"{self._key}/{self._read}"]):
            for group, varies in json.loads(self._store.get(f"{self._key}/{self._read}")):
                self._choice.add(group, varies)
            self._read += 1

    def may_be_chosen(self, chunk: Sequence[int]) -> bool:
        """Whether a group of this chunk can still be chosen; if not, no group of a later chunk can be either."""
        self._poll()
        return chunk[0] < self._choice.end

    def missing(self, store: RolloutStore) -> list[int]:
        """The candidates that are not stored and may still be chosen. Call it after `publish_stored`."""
        return [] if self._choice.is_final else store.missing(self._choice.candidates)

    def are_enough(self) -> bool:
        """Whether the choice is final, so that generation can end early. Cheap enough for every decoding step."""
        self._poll()
        return self.chooses and self._choice.is_final

    def chosen(self) -> list[int] | None:
        """The ids of the groups to train, None for all of them. Call it when all replicas have finished."""
        self._poll()
        return self._choice.chosen() if self.chooses else None

    def summary(self) -> dict[str, int]:
        """The counts for events.jsonl. Call it when all replicas have finished."""
        known, wanted = self._choice.varies, self._choice.wanted
        with_variance = sum(known.values())
        return {
            "candidates": len(self._choice.candidates),
            "generated": len(known),
            "with_variance": with_variance,
            "chosen": wanted,
            "filled": max(0, wanted - with_variance),
        }


def add_stored(choice: Choice, store: RolloutStore) -> None:
    """Make the stored candidates of ``choice`` known to it."""
    for number in store.group_ids:  # read one by one, because the store keeps few shards open
        if number in choice.candidates and number not in choice.varies:
            choice.add(number, has_variance(*store.read([number])))


def has_variance(group: Group) -> bool:
    return not bool(zero_variance(np.array([[response.reward for response in group.responses]])))
