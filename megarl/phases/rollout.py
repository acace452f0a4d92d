"""The rollout phase: the frozen policy of a stage answers all of the stage's prompts; nothing else holds memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict

import numpy as np

from megarl.distributed import Peers
from megarl.errors import STOPPED
from megarl.storage.files import make_directory
from megarl.phases.rollout_worker import Answer, Answerer, Question
from megarl.phases.candidates import Candidates
from megarl.phases.stop import StopRequest
from megarl.phases.rollout_stats import Tally
from megarl.rollout.engine import never
from megarl.storage.run_dir import RunDir
from megarl.recipe.schedule import cut_chunks
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal

STORE_SECONDS = 1.0  # between two shards: groups that became whole are lost for no longer than this


def rollout(run: RunDir, stage: int) -> None:
    """Fill and seal the store of ``stage``. What an earlier, killed attempt stored is not generated again."""
    stop = StopRequest()
    if run.is_sealed(stage):
        return  # a restart after a process that died between sealing and its end
    peers = Peers.join(leave=stop.exit_if_asked)
    directory = run.rollouts(stage)
    make_directory(directory)
    answerer = Answerer.build(run.recipe, stage, run.policy(stage))
    drift = answerer.check_weights(run.policy(stage), peers)
    run.log_event("weight_drift", phase="rollout", stage=stage, rank=peers.rank, **asdict(drift))
    whole = answerer.engine.repeats_chunks
    candidates, found = Candidates(peers, run.groups(stage), run.recipe.groups_per_stage), None
    if peers.rank == 0:  # for everybody: others may see a shared file system as it was a moment ago
        store = RolloutStore(directory)
        candidates.recall(store)
        found = store.missing(run.groups(stage))
    missing = set(peers.from_first("missing", found))
    chunks = missing_chunks(run, stage, missing, whole)
    total = len(run.groups(stage))
    if peers.rank == 0 and (there := total - sum(map(len, chunks))) > 0:
        run.log_event("resume", phase="rollout", stage=stage, skipped=there, total=total, unit="groups")

    def take() -> Iterator[Sequence[int]]:
        # replicas take the next chunk from the shared counter, so that a slow one does not hold the others
        while not stop.asked and (number := peers.store.add("next_chunk", 1) - 1) < len(chunks):
            if not candidates.may_be_chosen(chunks[number]):
                return
            yield chunks[number]

    def seen(answer: Answer) -> None:
        tally.add(answer)
        candidates.add(answer)

    # who repeats whole chunks ends the one that is begun
    interrupted = never if whole else lambda: stop.asked or candidates.are_enough()
    with RolloutWriter(
        directory, weights_hash=answerer.weights_hash, logprob_mode="processed", writer=peers.rank
    ) as writer:
        tally = Tally()
        for groups in generate(answerer, take(), interrupted, seen=seen):
            # a chunk that is cut elsewhere than in an earlier attempt has groups that are there
            writer.append([group for group in groups if group.group_id in missing])
            if tally.due():
                run.log_event("rollout_progress", stage=stage, rank=peers.rank, **tally.event(answerer.decoding))
    run.log_event("rollout_progress", stage=stage, rank=peers.rank, **tally.event(answerer.decoding))
    answerer.engine.close()
    if stop.asked:
        sys.exit(STOPPED)  # the others are told, too
    peers.barrier("generated")
    if peers.rank == 0:
        if chosen := candidates.chosen():
            run.log_event("dynamic_sampling", phase="rollout", stage=stage, **candidates.summary())
        seal(directory, run.groups(stage), chosen)
    peers.barrier("sealed")


def missing_chunks(run: RunDir, stage: int, missing: Collection[int], whole: bool) -> list[Sequence[int]]:
    """What is still to be generated, as the chunks that engines take.

    whole: the composition of a batch changes the last bits of its log-probs, so chunks of ``groups_per_chunk`` groups
    are always cut at the same places, and a resumed phase repeats all of a chunk: then it repeats it exactly. Else
    single groups, so that an engine takes as many as it has room for.
    """
    groups, schedule = run.groups(stage), run.recipe.schedule
    if not whole:
        return [[group] for group in groups if group in missing]
    interval = schedule.sync_every * schedule.prompts_per_update if schedule.sync_every else len(groups)
    parts = cut_chunks(groups, interval, run.recipe.rollout.groups_per_chunk)
    return [part for part in parts if any(group in missing for group in part)]


def generate(
    answerer: Answerer,
    chunks: Iterator[Sequence[int]],
    interrupted: Callable[[], bool] = never,
    store_seconds: float = STORE_SECONDS,
    seen: Callable[[Answer], None] = lambda answer: None,
) -> Iterator[list[Group]]:
    """The groups of ``chunks``, in portions to be stored: what became whole meanwhile, or a chunk to be repeated.

    ``seen`` is told of every answer at once, before it is stored.
    """
    table, sizes = answerer.recipe.rollout, []
    whole = answerer.engine.repeats_chunks and interrupted is never

    def questions() -> Iterator[list[Question]]:
        for chunk in chunks:
            sizes.append(len(chunk))
            yield [Question(group, answerer.prompts.train(group)) for group in chunk]

    portion: list[Group] = []
    stored = time.monotonic()
    for answer in answerer.answer(questions(), table.responses_per_prompt, table.temperature, interrupted):
        seen(answer)
        question = answer.question
        portion.append(Group(question.number, np.asarray(question.prompt.tokens, np.int32), answer.responses))
        # those of a chunk that is to be repeated come one after another
        if len(portion) == sizes[answer.chunk] if whole else time.monotonic() - stored >= store_seconds:
            yield portion
            portion, stored = [], time.monotonic()
    if portion:
        yield portion
