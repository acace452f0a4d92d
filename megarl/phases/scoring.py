"""Groups between their generation and their storage: rewards are found meanwhile, beside the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from megarl.beats import beat
from megarl.data.prompts import Prompt
from megarl.recipe.tables import RewardTable
from megarl.rewards import Score, is_scored
from megarl.rewards.parts import totals
from megarl.rewards.pool import VerifierPool
from megarl.rollout.engine import Completion
from megarl.storage.rollouts import Response

SECONDS_BETWEEN_LOOKS = 0.01  # where small models' responses end faster than that


@dataclass(frozen=True)
class SeededPrompt:
    """A prompt, the number that seeds its responses, and what an earlier stage made of them."""

    number: int
    prompt: Prompt
    begun: tuple[Response, ...] = ()  # all of the prompt's responses, some of them unfinished; (): none is begun


@dataclass(frozen=True)
class ScoredGroup:
    """All scored responses of a prompt, or unscored ones if some are unfinished at the token budget.

    ``chunk`` counts the chunks that were taken; CONTINUED: an earlier call's.
    """

    chunk: int
    seeded: SeededPrompt
    responses: tuple[Response, ...]


@dataclass(eq=False)
class PendingGroup:
    """A prompt whose responses are being generated or scored."""

    chunk: int
    seeded: SeededPrompt
    samples: int
    parts: dict[int, list[Completion]] = field(default_factory=dict)  # of the responses that are not finished
    responses: dict[int, Response] = field(default_factory=dict)  # of those that are, scored or not
    texts: dict[int, str] = field(default_factory=dict)  # of those that are to be scored together
    scores: dict[int, Score] = field(default_factory=dict)  # of those that are scored
    ended: dict[int, Response] = field(
        default_factory=dict
    )  # of those that wait for the others, to be scored with them
    cut: bool = False  # ``responses`` are not all finished, and none is scored
    done: bool = False  # handed out


class Scoring:
    """Asks for the rewards of responses and hands out groups that have all of theirs.

    in_order: in the order in which their last responses were generated; else as their last rewards come.
    longest: tokens that a response may have.
    """

    def __init__(self, verifiers: VerifierPool, table: RewardTable, in_order: bool, longest: int) -> None:
        self.seen: Callable[[ScoredGroup], None] = lambda group: None
        self.over_limit = 0  # responses that a verifier could not read within its limits
        self._verifiers, self._table, self._in_order, self._longest = verifiers, table, in_order, longest
        self._asked: dict[int, tuple[PendingGroup, int]] = {}  # number of the question -> whose response it is about
        self._generated: list[PendingGroup] = []  # wholly; the first to be so first
        self._whole: list[ScoredGroup] = []  # not handed out yet
        self._looked = time.monotonic()

    def add(self, group: PendingGroup, sample: int, response: Response, text: str) -> None:
        """A response is generated; its reward is to be found."""
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
        """A group of which responses are unfinished: it is handed out as it is."""
        group.responses, group.ended, group.cut = group.ended, {}, True
        self._generated.append(group)

    def look(self, wait: bool = False, unless: Callable[[], bool] = lambda: False) -> None:
        """Take what verdicts there are. ``wait``: for one at least, unless that becomes true."""
        self._looked = time.monotonic()
        for number, verdict in self._verifiers.verdicts(wait, unless):
            group, sample = self._asked.pop(number)
            group.scores[sample] = verdict.found
            if verdict.over:
                self.over_limit += 1
                place = f"response {sample} to prompt {group.seeded.number}"
                print(f"{place} scores 0: its verifier ran out of limits ({verdict.over})", flush=True)
        for group in self._generated:
            if group.cut or len(group.scores) == group.samples:
                self._whole.append(self._rewarded(group))
                self.seen(self._whole[-1])
            elif self._in_order:
                break
        self._generated = [group for group in self._generated if not group.done]

    def _rewarded(self, group: PendingGroup) -> ScoredGroup:
        """The group with its rewards; it holds its responses no longer."""
        if group.cut:
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

    def settle(self) -> None:
        """Wait for all rewards that are asked for."""
        for _ in self.settling():
            pass

    def settling(self, unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """As `settle`, from one look to the next; ends early when ``unless`` becomes true."""
        self.look()
        yield
        while self._asked and not unless():
            beat("scoring")
            self.look(wait=True, unless=unless)
            yield

    def is_due(self) -> bool:
        """Whether the last look was so long ago that another one costs next to nothing."""
        return time.monotonic() - self._looked > SECONDS_BETWEEN_LOOKS

    def take(self) -> list[ScoredGroup]:
        """The groups that have become whole since the last call."""
        self.look()
        groups, self._whole = self._whole, []
        return groups

    def close(self) -> None:
        """End the verifiers' processes; nothing is scored any more."""
        self._verifiers.close()
