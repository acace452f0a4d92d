"""Scores generated responses in verifier processes, while the engine goes on, and collects complete groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from megarl.data.prompts import Prompt
from megarl.heartbeats import beat
from megarl.recipe.tables import RewardTable
from megarl.rewards import Score, is_scored
from megarl.rewards.parts import totals
from megarl.rewards.pool import VerifierPool
from megarl.rollout.engine import Completion
from megarl.storage.rollouts import Response

POLL_SECONDS = 0.01  # responses of small models end faster than that, and polling for each would cost too much


@dataclass(frozen=True)
class SeededPrompt:
    """A prompt, the number that seeds its responses, and what an earlier stage generated of them."""

    number: int
    prompt: Prompt
    earlier: tuple[Response, ...] = ()  # all responses of the group, at least one unfinished; () for a new group


@dataclass(frozen=True)
class ScoredGroup:
    """All responses to a prompt: scored, or all unscored if some are unfinished at the token budget."""

    chunk: int  # number of its chunk in this call of `RolloutWorker.generate`; CONTINUED: of an earlier call
    seeded: SeededPrompt
    responses: tuple[Response, ...]


@dataclass(eq=False)
class PendingGroup:
    """A prompt whose responses are being generated or scored."""

    chunk: int
    seeded: SeededPrompt
    samples: int
    # keys of the following are indices of responses, 0 to samples - 1
    parts: dict[int, list[Completion]] = field(default_factory=dict)  # spans of responses that are not finished
    responses: dict[int, Response] = field(default_factory=dict)  # finished ones, whether scored or not
    texts: dict[int, str] = field(default_factory=dict)  # finished ones, to be scored together with the whole group
    scores: dict[int, Score] = field(default_factory=dict)
    # with a token budget: finished ones that are not scored before all responses of the group have ended
    ended: dict[int, Response] = field(default_factory=dict)
    unfinished: bool = False  # some of ``responses`` are unfinished, so that none is scored
    done: bool = False  # a `ScoredGroup` was made of it


class Scoring:
    """Has responses scored by verifier processes, and returns groups once all of their rewards are known.

    in_order: return groups in the order in which their generation ended, not in that in which their scoring ended.
    longest: the most tokens that a response may have, for rewards that depend on the length.
    """

    def __init__(self, verifiers: VerifierPool, table: RewardTable, in_order: bool, longest: int) -> None:
        self.on_scored: Callable[[ScoredGroup], None] = lambda group: None
        self.over_limit = 0  # responses that a verifier could not read within its limits
        self._verifiers, self._table, self._in_order, self._longest = verifiers, table, in_order, longest
        self._asked: dict[int, tuple[PendingGroup, int]] = {}  # number of a pending question -> (group, response index)
        self._generated: list[PendingGroup] = []  # all responses generated, not all scored; in order of generation
        self._whole: list[ScoredGroup] = []  # scored, but not returned by `take` yet
        self._last_poll = time.monotonic()

    def add(self, group: PendingGroup, sample: int, response: Response, text: str) -> None:
        """Have a generated response scored. text: the response decoded, as the verifier reads it."""
        group.responses[sample] = response
        if not is_scored(response.finish_reason, self._table):
            group.scores[sample] = Score(0.0)
        elif self._table.group:
            group.texts[sample] = text
        else:
            self._asked[self._verifiers.ask(group.seeded.prompt, text)] = group, sample
        if len(group.responses) == group.samples:
            self._generated.append(group)
            if group.texts:
                samples = sorted(group.texts)
                numbers = self._verifiers.ask_group(group.seeded.prompt, [group.texts.pop(k) for k in samples])
                self._asked |= {number: (group, k) for number, k in zip(numbers, samples, strict=True)}

    def add_unscored(self, group: PendingGroup) -> None:
        """Add a group with unfinished responses, all in ``group.ended``: `take` returns it without rewards."""
        group.responses, group.ended, group.unfinished = group.ended, {}, True
        self._generated.append(group)

    def poll(self, wait: bool = False, unless: Callable[[], bool] = lambda: False) -> None:
        """Collect the verdicts that have arrived. wait: wait for at least one, until ``unless`` becomes True."""
        self._last_poll = time.monotonic()
        for number, verdict in self._verifiers.verdicts(wait, unless):
            group, sample = self._asked.pop(number)
            group.scores[sample] = verdict.found
            if verdict.over:
                self.over_limit += 1
                place = f"response {sample} to prompt {group.seeded.number}"
                print(f"{place} scores 0: its verifier exceeded a limit ({verdict.over})", flush=True)
        for group in self._generated:
            if group.unfinished or len(group.scores) == group.samples:
                self._whole.append(self._rewarded(group))
                self.on_scored(self._whole[-1])
            elif self._in_order:
                break
        self._generated = [group for group in self._generated if not group.done]

    def _rewarded(self, group: PendingGroup) -> ScoredGroup:
        """The `ScoredGroup` of a pending group, which is emptied to free its memory."""
        if group.unfinished:
            group.done = True
            return ScoredGroup(group.chunk, group.seeded, tuple(group.responses.pop(k) for k in range(group.samples)))
        responses, scores = zip(*((group.responses.pop(k), group.scores[k]) for k in range(group.samples)), strict=True)
        found = totals(scores, [len(response.tokens) for response in responses], self._table, self._longest)
        group.done = True
        rewarded = tuple(
            replace(response, reward=reward, correct=None if correct == reward else correct)
            for response, (reward, correct) in zip(responses, found, strict=True)
        )
        return ScoredGroup(group.chunk, group.seeded, rewarded)

    def wait_for_all(self) -> None:
        """Wait until all responses that were added are scored."""
        for _ in self.waiting():
            pass

    def waiting(self, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """As `wait_for_all`, but yields after each poll, and ends early when ``unless`` becomes True."""
        self.poll()
        yield
        while self._asked and not unless():
            beat("scoring")
            self.poll(wait=True, unless=unless)
            yield

    def is_due(self) -> bool:
        """Whether the last poll was so long ago that another one is worth its cost."""
        return time.monotonic() - self._last_poll > POLL_SECONDS

    def take(self) -> list[ScoredGroup]:
        """The groups that have become complete since the last call."""
        self.poll()
        groups, self._whole = self._whole, []
        return groups

    def close(self) -> None:
        """End the verifier processes; nothing can be scored afterwards."""
        self._verifiers.close()
