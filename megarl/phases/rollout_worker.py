"""An engine with its verifiers: prompts go in, scored responses come out. All phases that generate use it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.prompts import Prompt, open_prompts
from megarl.data.tokenizer import stop_token_ids
from megarl.distributed import ReplicaGroup
from megarl.heartbeats import beat
from megarl.models.hf_config import read_hf_config
from megarl.phases.scoring import PendingGroup, Scoring, text_of
from megarl.recipe.tables import Recipe
from megarl.rewards.parts import build_verifier
from megarl.rewards.pool import Limits, VerifierPool
from megarl.rollout import build_engine
from megarl.rollout.drift import Drift, hugging_face_reference, measure_drift
from megarl.rollout.engine import (
    Completion,
    EngineFault,
    Request,
    Sampling,
    discard,
    fault,
    next_seed,
    response_seed,
)
from megarl.storage.policies import decode_reference, encode_reference, read_info, read_reference
from megarl.storage.rollouts import Group, Response
from megarl.storage.run_dir import Stage
from megarl.storage.shards import UNFINISHED

PROMPTS, PROMPT_TOKENS = 16, 128  # size of the reference text of a base model, which transformers scores on a CPU
STORE_SECONDS = 1.0  # between two shards; a kill loses only the groups completed since the last one
_Slot = tuple[PendingGroup, int]  # a response: its group and its index in the group


def never() -> bool:
    """Nothing interrupts the generation."""
    return False


class RolloutWorker:
    """An engine with one policy, and the verifier processes that score its responses while it generates others."""

    discarded = 0  # responses of the engine that were thrown away, because they were faulty
    checksum: str | None = None  # of the engine's weights at their last check; None if the engine has no checksums
    other_checksum: str | None = None  # `checksum` of the previous policy, if the last `load` changed the weights

    def __init__(self, recipe: Recipe, stage: int, policy_dir: Path, for_training: bool = True) -> None:
        """Start the engine that the recipe names for ``stage``.

        for_training: record routed experts if the recipe lets the actor replay them.
        """
        beat("engine", f"start of prompts, verifiers and engine with {policy_dir.name}")
        info = read_info(policy_dir)
        self.recipe, self.weights_hash = recipe, info.weights_hash
        self.tokenizer, self.prompts = open_prompts(recipe, policy_dir)
        # forks, so it comes before the engine starts threads or CUDA
        verifiers = VerifierPool(lambda: build_verifier(recipe, self.prompts), Limits.of_this_process(recipe))
        experts = for_training and recipe.actor.trains_recorded_experts
        self.engine = build_engine(recipe, stage, policy_dir, info.version, routed_experts=experts)
        # repeated chunks must be stored in the same order, whichever response was scored first
        in_order, longest = self.engine.repeats_chunks, recipe.rollout.max_response_tokens
        self.scoring = Scoring(verifiers, recipe.reward, text_of(self.tokenizer), in_order, longest)
        self.stop_token_ids = tuple(stop_token_ids(self.tokenizer, policy_dir))
        self.vocabulary: int = read_hf_config(policy_dir)["vocab_size"]  # the model's number of tokens
        self.stopped: Callable[[], bool] = never  # once True, `generate` ends, without a wait for rewards
        self.unfinished: list[PendingGroup] = []  # left by an interrupted `generate`

    def close(self) -> None:
        """Release engine and verifiers; the worker is not used again."""
        self.scoring.close()
        self.engine.close()

    def load(self, policy_dir: Path) -> None:
        """Load another policy into the engine. The caller must then call `check_drift`."""
        beat("load", f"load of policy {policy_dir.name}")
        info = read_info(policy_dir)
        self.engine.load_weights(policy_dir, info.version)
        self.other_checksum = None if info.weights_hash == self.weights_hash else self.checksum
        self.weights_hash = info.weights_hash

    def check_drift(self, policy_dir: Path, replicas: ReplicaGroup) -> Drift:
        """Compare the engine's log-probs with those of the actor that exported its policy; call it after every load.

        If weights that were loaded in place are wrong, the engine is created anew and checked again. `EngineFault` if
        the weights of a new engine are wrong.
        """
        beat("check of weights", policy_dir.name)
        reference = read_reference(policy_dir)
        if reference is None:  # a base model has no exporting actor: transformers scores it, once for all replicas
            name = f"reference of {self.weights_hash}"
            text = [list(self.prompts.train(number).tokens[:PROMPT_TOKENS]) for number in range(PROMPTS)]
            reference = decode_reference(
                replicas.once(name, lambda: encode_reference(hugging_face_reference(policy_dir, text)))
            )
        try:
            drift = measure_drift(self.engine, reference, self.other_checksum)
        except EngineFault as error:
            if not self.engine.restart():
                raise
            print(f"{error}; the engine was created anew because of that", file=sys.stderr)
            drift = measure_drift(self.engine, reference, self.other_checksum)
        self.checksum = drift.checksum
        return drift

    def sampling(self, **changes: Any) -> Sampling:
        """How responses are sampled for training, with ``changes``, which are fields of `Sampling`."""
        table = self.recipe.rollout
        draws = Sampling(
            temperature=table.temperature,
            max_tokens=table.max_response_tokens,
            samples=table.responses_per_prompt,
            stop_token_ids=self.stop_token_ids,
            seeds=(),
            timeout=table.response_timeout,
        )
        return replace(draws, **changes)

    def generate(
        self,
        take: Callable[[], Sequence[int] | None],
        prompt: Callable[[int], Prompt],
        draws: Sampling,
        *,
        interrupted: Callable[[], bool] = never,
        within_chunks: bool = False,
        earlier: Callable[[int], tuple[Response, ...]] = lambda group: (),
        other_seeds: int = 0,
        scored_first: bool = False,
        store_seconds: float = STORE_SECONDS,
        watch: Callable[[Sequence[Completion], Sequence[Group]], None] = lambda ended, scored: None,
    ) -> Iterator[list[Group]]:
        """Generate and score groups; yields portions of complete ones. What is faulty is made again, see `discard`.

        A portion is a whole chunk if the engine has `repeats_chunks`, unless ``within_chunks``; otherwise it is all
        groups that were completed within ``store_seconds``.

        take: gives the group ids of the next chunk when the engine has room for it; None: there is no other chunk.
        draws: how each response is sampled, but for the seeds.
        interrupted: once it returns True, or the worker is `stopped`, no more chunks are taken, and responses are
            interrupted; the next call continues them first. An engine with `repeats_chunks` ends its chunk before.
        within_chunks: interrupt such an engine, too.
        earlier: the responses of a group that an earlier stage left unfinished, which are continued; () for a new one.
        other_seeds: is added to the ids of groups for the seeds of their responses.
        scored_first: take a chunk only once all responses generated before are scored.
        watch: gets, after each step, the responses that ended or were interrupted, and the groups that are scored.
        """
        requests = _Requests(self, prompt, draws, earlier, other_seeds)
        whole, stopping = self.engine.repeats_chunks and not within_chunks, False
        portion, stored = list[Group](), time.monotonic()
        try:
            while True:
                stopping = stopping or (not whole and (self.stopped() or interrupted()))
                if not stopping:
                    requests.submit(take, scored_first)
                ended: list[Completion] = []
                if self.engine.decoding:
                    ended = requests.receive(self.engine.interrupt() if stopping else self.engine.step())
                    scored = requests.scored() if self.scoring.is_due() else []
                elif self.scoring.busy and not self.stopped():
                    beat("scoring")
                    scored = requests.scored(wait=True)
                else:
                    break
                watch(ended, scored)
                portion += scored
                # chunks come one after another, and so do their groups, since then scoring is in order
                while portion and (
                    len(portion) >= requests.sizes[0] if whole else time.monotonic() - stored >= store_seconds
                ):
                    size = requests.sizes.pop(0) if whole else len(portion)
                    yield portion[:size]
                    portion, stored = portion[size:], time.monotonic()
        finally:
            self.engine.abort()
        if portion:
            yield portion
        self.unfinished = list(requests.pending.values())


def with_policy(
    worker: RolloutWorker | None,
    stage: Stage,
    policy: Path,
    replicas: ReplicaGroup,
    place: dict[str, Any],
    for_training: bool = True,
) -> RolloutWorker:
    """``worker``, or a new one, with a policy that is loaded and checked; logs a `weight_drift` event.

    place: further fields of the event. for_training: as in `RolloutWorker`.
    """
    start, run = time.perf_counter(), stage.run
    if worker is None:
        run.check_prompts()
        # a live run removes policies while its engines run, and would leave a link to nothing
        path = policy if place["phase"] == "live" else run.under_one_path(policy, replicas.rank)
        worker = RolloutWorker(run.recipe, stage.number, path, for_training)
    else:
        worker.load(policy)
    drift, seconds = worker.check_drift(policy, replicas), round(time.perf_counter() - start, 3)
    stage.log_event("weight_drift", **place, rank=replicas.rank, load_seconds=seconds, **asdict(drift))
    return worker


@dataclass
class _Requests:
    """The requests of one call of `RolloutWorker.generate`, whose arguments it has."""

    worker: RolloutWorker
    prompt: Callable[[int], Prompt]
    draws: Sampling
    earlier: Callable[[int], tuple[Response, ...]]
    other_seeds: int

    def __post_init__(self) -> None:
        self.pending = {group.number: group for group in self.worker.unfinished}  # not scored yet
        self.sizes: list[int] = []  # of the chunks that are not stored yet
        self._left = self.worker.unfinished  # to continue before any chunk
        self._more = True
        self._again: list[_Slot] = []  # responses whose last attempt was discarded
        self._requests = 0  # number of requests so far
        # (request, prompt in it, sample) -> the response that the engine has not yet returned
        self._asked: dict[tuple[int, int, int], _Slot] = {}

    def submit(self, take: Callable[[], Sequence[int] | None], scored_first: bool) -> None:
        """Submit discarded responses, unfinished ones and chunks as long as the engine has room for them."""
        engine, scoring = self.worker.engine, self.worker.scoring
        while (self._again or self._left or self._more) and engine.has_room():
            if self._again:
                self._ask(self._again, continues=True)
                self._again = []
            elif self._left:
                self._ask(self._slots(self._left), continues=True)
                self._left = []
            elif scored_first and scoring.busy:
                return
            elif (chunk := take()) is None:
                self._more = False
            else:
                beat("chunk", f"chunk {self._requests + 1} of this replica, prompt {chunk[0]}")
                groups = [_pending(number, self.prompt(number), self.draws, self.earlier(number)) for number in chunk]
                self.pending |= {group.number: group for group in groups}
                self.sizes.append(len(chunk))
                self._ask(self._slots(groups), continues=any(group.parts or group.responses for group in groups))

    def receive(self, completions: Sequence[tuple[int, Completion]]) -> list[Completion]:
        """Have finished responses scored, and keep the parts of the others; what is faulty is generated again.

        Returns the completions without the faulty ones.
        """
        kept = []
        for number, completion in completions:
            group, k = self._asked.pop((number, completion.prompt, completion.sample))
            before = group.parts.get(k)
            done = len(before.tokens) if before else 0
            most = int(min(self.draws.max_tokens - done, self.draws.budget))
            if why := fault(completion, most, self.worker.vocabulary):
                where = f"response {k} to prompt {group.number}"
                group.discarded[k] = discard(why, where, group.discarded.get(k, 0))
                self.worker.discarded += 1
                self._again.append((group, k))
                continue
            kept.append(completion)
            if len(completion.tokens):
                group.parts[k] = _extended(before, completion)
            if completion.finish_reason != "interrupted":
                response = replace(group.parts.pop(k), discarded=group.discarded.get(k))
                if completion.finish_reason == "length" and len(response.tokens) < self.draws.max_tokens:
                    response = replace(response, finish_reason=UNFINISHED)
                self.worker.scoring.add(group, k, response)
        return kept

    def scored(self, wait: bool = False) -> list[Group]:
        """The groups that are scored since the last call, which are not pending then. wait: as in `Scoring.take`."""
        found = self.worker.scoring.take(wait, self.worker.stopped)
        for group in found:
            del self.pending[group.group_id]
        return found

    def _slots(self, groups: Sequence[PendingGroup]) -> list[_Slot]:
        return [(group, k) for group in groups for k in range(self.draws.samples) if k not in group.responses]

    def _ask(self, slots: list[_Slot], continues: bool) -> None:
        """Submit a request for responses. continues: repeat the prompt for each response, with its prefix."""
        run_seed = self.worker.recipe.run.seed
        seeds = tuple(
            next_seed(response_seed(run_seed, group.number + self.other_seeds, k), group.discarded.get(k, 0))
            for group, k in slots
        )
        draws = replace(self.draws, seeds=seeds)
        if continues:
            parts = [group.parts.get(k) for group, k in slots]
            prefixes = tuple(tuple(part.tokens.tolist()) if part else () for part in parts)
            draws = replace(draws, samples=1, prefixes=prefixes)
        prompts = [list(group.prompt.tokens) for group, _ in slots[:: draws.samples]]
        self.worker.engine.submit(self._requests, Request(prompts, draws))
        for index, slot in enumerate(slots):
            self._asked[self._requests, *divmod(index, draws.samples)] = slot
        self._requests += 1


def _pending(number: int, prompt: Prompt, draws: Sampling, earlier: Sequence[Response]) -> PendingGroup:
    """A group to generate, with the responses, or parts of them, that an earlier stage generated."""
    group = PendingGroup(number, prompt, draws.samples, together=draws.budget < math.inf or bool(earlier))
    for sample, response in enumerate(earlier):
        if response.discarded:
            group.discarded[sample] = response.discarded
        if response.finish_reason == UNFINISHED:
            group.parts[sample] = response
        else:
            group.responses[sample] = response
    return group


def _extended(before: Response | None, completion: Completion) -> Response:
    """A response, without a reward, of the tokens ``before``, if there are any, and those of a completion.

    A continuation recomputes the tokens before it with its own policy, so perhaps with other experts. For these tokens
    the first record is kept, since the stored log-probs belong to it.
    """
    version, experts = completion.policy_version, completion.routed_experts
    new = Response(
        completion.tokens, completion.logprobs, 0.0, completion.finish_reason, version, routed_experts=experts
    )
    if before is None:
        return new
    versions = np.concatenate([before.versions, new.versions])
    if before.routed_experts is None or experts is None:
        experts = None
    else:
        experts = np.concatenate([before.routed_experts, experts[len(before.routed_experts) :]])
    return replace(
        new,
        tokens=np.concatenate([before.tokens, new.tokens]),
        rollout_logprobs=np.concatenate([before.rollout_logprobs, new.rollout_logprobs]),
        policy_version=before.policy_version,
        policy_versions=None if (versions == versions[0]).all() else versions,
        routed_experts=experts,
    )
