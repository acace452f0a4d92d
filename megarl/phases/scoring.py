"""Scores generated responses in verifier processes, while the engine goes on, and collects complete groups."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.data.prompts import Prompt
from megarl.heartbeats import beat
from megarl.recipe.tables import RewardTable
from megarl.rewards import Score, is_scored
from megarl.rewards.parts import totals
from megarl.rewards.pool import VerifierPool
from megarl.storage.rollouts import Group, Response
from megarl.storage.shards import any_unfinished

POLL_SECONDS = 0.01  # responses of small models end faster than that, and polling for each would cost too much


@dataclass(eq=False)
class PendingGroup:
    """A prompt whose responses are being generated or scored."""

    number: int  # id of the group
    prompt: Prompt
    samples: int
    # score its responses only once all have ended, and not at all if some are unfinished then, at their token budget
    together: bool = False
    # keys of the following are indices of responses, 0 to samples - 1
    parts: dict[int, Response] = field(default_factory=dict)  # those that have not ended, as far as they are generated
    responses: dict[int, Response] = field(default_factory=dict)  # those that have ended, whether scored or not
    scores: dict[int, Score] = field(default_factory=dict)
    discarded: dict[int, int] = field(default_factory=dict)  # faulty attempts that were thrown away

    @property
    def complete(self) -> bool:
        """Whether all responses have ended and all that are to be scored are."""
        if len(self.responses) < self.samples:
            return False
        return len(self.scores) == self.samples or any_unfinished(self.responses.values())


@functools.cache
def text_of(tokenizer: Any) -> Callable[[np.ndarray], str]:
    """The function that decodes the tokens of a response for a verifier; of gpt-oss's, the final channel alone."""
    channels = "<|channel|>" in tokenizer.get_added_vocab()

    def text(tokens: np.ndarray) -> str:
        if channels:
            _, final, answer = str(tokenizer.decode(tokens.tolist())).rpartition("<|channel|>final<|message|>")
            if final:
                return re.sub(r"<\|\w+\|>", "", answer)
        return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    return text


class Scoring:
    """Has responses scored by verifier processes, and returns groups once all of their rewards are known.

    decode: the text of a response's tokens, as the verifier reads it.
    in_order: return groups in the order in which their generation ended, not in that in which their scoring ended.
    longest: the most tokens that a response may have, for rewards that depend on the length.
    """

    def __init__(
        self,
        verifiers: VerifierPool,
        table: RewardTable,
        decode: Callable[[np.ndarray], str],
        in_order: bool,
        longest: int,
    ) -> None:
        self.over_limit = 0  # responses that a verifier could not read within its limits
        self._verifiers, self._table, self._decode = verifiers, table, decode
        self._in_order, self._longest = in_order, longest
        self._asked: dict[int, tuple[PendingGroup, int]] = {}  # number of a pending question -> (group, response index)
        self._generated: list[PendingGroup] = []  # all responses generated, not all scored; in order of generation
        self._last_poll = time.monotonic()

    def add(self, group: PendingGroup, sample: int, response: Response) -> None:
        """Have a generated response scored, or all responses of its group together with the last one."""
        group.responses[sample] = response
        if not (group.together or self._table.group):
            self._ask(group, [sample])
        if len(group.responses) == group.samples:
            self._generated.append(group)
            if (group.together or self._table.group) and not any_unfinished(group.responses.values()):
                self._ask(group, range(group.samples))

    def _ask(self, group: PendingGroup, samples: Sequence[int]) -> None:
        scored = [k for k in samples if is_scored(group.responses[k].finish_reason, self._table)]
        group.scores |= {k: Score(0.0) for k in samples if k not in scored}
        texts = [self._decode(group.responses[k].tokens) for k in scored]
        together = [tuple(texts)] if texts else []
        asked: Sequence[str | tuple[str, ...]] = together if self._table.group else texts
        numbers = [number for each in asked for number in self._verifiers.ask(group.prompt, each)]
        self._asked |= {number: (group, k) for number, k in zip(numbers, scored, strict=True)}

    @property
    def busy(self) -> bool:
        """Whether responses wait for their scores, or groups to be taken."""
        return bool(self._asked or self._generated)

    def is_due(self) -> bool:
        """Whether the last `take` was so long ago that another one is worth its cost."""
        return time.monotonic() - self._last_poll > POLL_SECONDS

    def take(self, wait: bool = False, unless: Callable[[], bool] = lambda: False) -> list[Group]:
        """The groups that have become complete since the last call.

        wait: if scores are missing, wait for at least one, until ``unless`` becomes True.
        """
        self._last_poll = time.monotonic()
        for number, verdict in self._verifiers.verdicts(wait, unless):
            group, sample = self._asked.pop(number)
            group.scores[sample] = verdict
            if verdict.over:
                self.over_limit += 1
                place = f"response {sample} to prompt {group.number}"
                print(f"{place} scores 0: its verifier exceeded a limit ({verdict.over})", file=sys.stderr, flush=True)
        if self._in_order:  # those behind one that waits need no look
            whole = list(itertools.takewhile(lambda group: group.complete, self._generated))
            self._generated = self._generated[len(whole) :]
        else:
            whole = [group for group in self._generated if group.complete]
            self._generated = [group for group in self._generated if group not in whole]
        return [self._rewarded(group) for group in whole]

    def again(self, groups: Sequence[Group], prompt_of: Callable[[Group], Prompt]) -> list[Group]:
        """Stored groups, scored again; in order, if `Scoring` was made so."""
        for group in groups:
            pending = PendingGroup(group.group_id, prompt_of(group), len(group.responses))
            for sample, response in enumerate(group.responses):
                self.add(pending, sample, replace(response, correct=None))
        found = self.take()
        while self._asked:
            beat("scoring")
            found += self.take(wait=True)
        given = {group.group_id: group.prompt_tokens for group in groups}
        return [replace(group, prompt_tokens=given[group.group_id]) for group in found]

    def _rewarded(self, group: PendingGroup) -> Group:
        responses = [group.responses[k] for k in range(group.samples)]
        if not any_unfinished(responses):
            scores, lengths = [group.scores[k] for k in range(group.samples)], [len(r.tokens) for r in responses]
            responses = [
                replace(response, reward=reward, correct=None if correct == reward else correct)
                for response, (reward, correct) in zip(
                    responses, totals(scores, lengths, self._table, self._longest), strict=True
                )
            ]
        tokens = np.asarray(group.prompt.tokens, np.int32)
        return Group(group.number, tokens, tuple(responses), group.prompt.row)

    def close(self) -> None:
        """End the verifier processes; nothing can be scored afterwards."""
        self._verifiers.close()
