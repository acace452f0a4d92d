"""Groups of scored responses, in portions that are stored: what rollouts, live runs and evaluations generate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from megarl.phases.rollout_worker import Draws, RolloutWorker
from megarl.phases.scoring import ScoredGroup, SeededPrompt
from megarl.recipe.schedule import cut_chunks
from megarl.rollout.engine import never
from megarl.storage.rollouts import Group, Response

STORE_SECONDS = 1.0  # between two shards: a kill loses at most the groups completed in this time


def missing_chunks(
    groups: Sequence[int], missing: Collection[int], whole: bool, size: int, interval: int | None = None
) -> list[Sequence[int]]:
    """What is still to be generated, as the chunks that engines take: ``missing`` of ``groups``.

    whole: the composition of a batch changes the last bits of its log-probs, so chunks of ``size`` groups are always
    cut at the same places, and at every ``interval``; a resumed phase repeats all of a chunk: then it repeats it
    exactly. Else single groups, so that an engine takes as many as it has room for.
    """
    if not whole:
        return [[group] for group in groups if group in missing]
    parts = cut_chunks(groups, interval or max(1, len(groups)), size)
    return [part for part in parts if any(group in missing for group in part)]


def generate_rollouts(
    worker: RolloutWorker,
    chunks: Iterator[Sequence[int]],
    interrupted: Callable[[], bool] = never,
    store_seconds: float = STORE_SECONDS,
    seen: Callable[[ScoredGroup], None] = lambda group: None,
    begun: Callable[[int], tuple[Response, ...]] = lambda group: (),
    budget: float = math.inf,
) -> Iterator[list[Group]]:
    """`generate` groups of training prompts as ``[rollout]`` says.

    begun: what there is of a group, to be continued. budget: tokens that are added to a response at most.
    """
    table = worker.recipe.rollout
    draws = Draws(table.responses_per_prompt, table.temperature, table.max_response_tokens, budget=budget)

    def prompt(group: int) -> SeededPrompt:
        return SeededPrompt(group, worker.prompts.train(group), begun(group))

    return generate(worker, chunks, prompt, draws, interrupted, store_seconds, seen)


def generate(
    worker: RolloutWorker,
    chunks: Iterator[Sequence[int]],
    prompt: Callable[[int], SeededPrompt],
    draws: Draws,
    interrupted: Callable[[], bool] = never,
    store_seconds: float = STORE_SECONDS,
    seen: Callable[[ScoredGroup], None] = lambda group: None,
) -> Iterator[list[Group]]:
    """The groups of ``chunks``, in portions to be stored: what became whole meanwhile, or a chunk to be repeated.

    A group has the number that seeds it. ``seen`` is called with each as soon as it is scored, before it is stored.
    """
    sizes: list[int] = []
    whole = worker.engine.repeats_chunks and interrupted is never

    def seeded_prompts() -> Iterator[list[SeededPrompt]]:
        for chunk in chunks:
            sizes.append(len(chunk))
            yield [prompt(group) for group in chunk]

    portion: list[Group] = []
    stored = time.monotonic()
    for scored in worker.generate(seeded_prompts(), draws, interrupted, seen):
        seeded = scored.seeded
        portion.append(Group(seeded.number, np.asarray(seeded.prompt.tokens, np.int32), scored.responses))
        # those of a chunk that is to be repeated come one after another
        if len(portion) == sizes[scored.chunk] if whole else time.monotonic() - stored >= store_seconds:
            yield portion
            portion, stored = [], time.monotonic()
    if portion:
        yield portion
