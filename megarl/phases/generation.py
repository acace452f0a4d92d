"""Generates groups of scored responses, in portions to be stored, for rollouts, live runs and evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from megarl.phases.rollout_worker import RolloutWorker, SamplingSettings
from megarl.phases.scoring import ScoredGroup, SeededPrompt
from megarl.recipe.schedule import cut_chunks
from megarl.rollout.engine import never
from megarl.storage.rollouts import Group, Response

STORE_SECONDS = 1.0  # between two shards; a kill loses only the groups completed since the last one


def missing_chunks(
    groups: Sequence[int], missing: Collection[int], whole: bool, size: int, interval: int | None = None
) -> list[Sequence[int]]:
    """The chunks, lists of group ids, in which engines take the ``missing`` ones of ``groups``.

    whole: for engines with `repeats_chunks`, whose log-probs depend in the last bits on the composition of a batch.
        Chunks are cut every ``size`` groups and at every ``interval``, always at the same places, and a chunk with a
        missing group is repeated as a whole, so that a resumed phase repeats it exactly. Otherwise a chunk is a single
        group, so that an engine takes as many as it has room for.
    interval: groups that one policy version generates; None: all of them.
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
    on_scored: Callable[[ScoredGroup], None] = lambda group: None,
    earlier: Callable[[int], tuple[Response, ...]] = lambda group: (),
    budget: float = math.inf,
) -> Iterator[list[Group]]:
    """`generate` groups of training prompts with the settings of ``[rollout]``.

    earlier: the responses of a group that an earlier stage left unfinished, which are continued; () for a new group.
    budget: largest number of tokens to add to each response.
    """
    table = worker.recipe.rollout
    draws = SamplingSettings(table.responses_per_prompt, table.temperature, table.max_response_tokens, budget=budget)

    def prompt(group: int) -> SeededPrompt:
        return SeededPrompt(group, worker.prompts.train(group), earlier(group))

    return generate(worker, chunks, prompt, draws, interrupted, store_seconds, on_scored)


def generate(
    worker: RolloutWorker,
    chunks: Iterator[Sequence[int]],
    prompt: Callable[[int], SeededPrompt],
    draws: SamplingSettings,
    interrupted: Callable[[], bool] = never,
    store_seconds: float = STORE_SECONDS,
    on_scored: Callable[[ScoredGroup], None] = lambda group: None,
) -> Iterator[list[Group]]:
    """Generate the groups of ``chunks``; yields portions of complete groups, which the caller stores.

    A portion is a whole chunk if the engine has `repeats_chunks` and nothing interrupts it; otherwise it is all groups
    that were completed within ``store_seconds``.

    prompt: gives the prompt of a group and the number that seeds its responses, which becomes the group's id.
    interrupted: once it returns True, no more chunks are taken, and unfinished responses are kept in the worker.
    on_scored: called with each group as soon as it is scored, before it is stored.
    """
    sizes: list[int] = []
    whole = worker.engine.repeats_chunks and interrupted is never

    def seeded_prompts() -> Iterator[list[SeededPrompt]]:
        for chunk in chunks:
            sizes.append(len(chunk))
            yield [prompt(group) for group in chunk]

    portion: list[Group] = []
    stored = time.monotonic()
    for scored in worker.generate(seeded_prompts(), draws, interrupted, on_scored):
        seeded = scored.seeded
        portion.append(Group(seeded.number, np.asarray(seeded.prompt.tokens, np.int32), scored.responses))
        # in the first case scoring is in order, so the groups of a chunk come one after another
        if len(portion) == sizes[scored.chunk] if whole else time.monotonic() - stored >= store_seconds:
            yield portion
            portion, stored = [], time.monotonic()
    if portion:
        yield portion
