"""What an objective does to each token of stored responses, given a policy of the run: `annotate`.

transformers computes the policy's log-probs on the CPU, as for `megarl audit`. For an objective that uses the whole
optimizer batch, the batch in which the response is trained is scored as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.advantages import group_advantages, zero_variance
from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives import Objective, Terms, build_objective, frozen_logprobs
from megarl.recipe.load import override_recipe, recipe_diff
from megarl.recipe.names import GROUP_ADVANTAGES
from megarl.recipe.tables import ObjectiveTable, Recipe
from megarl.rollout.drift import load_model, score_with_entropy
from megarl.storage.metrics.summary import rewards_of
from megarl.storage.rollouts import Group, Response, RolloutStore
from megarl.storage.run_dir import RunDir, Stage
from megarl.storage.run_dir.retention import check_kept, require_policy
from megarl.views.responses.select import StoredResponse

Scores = list[tuple[np.ndarray, np.ndarray]]  # (log-probs, entropies) of each response; [n] float32, nats


@dataclass(frozen=True)
class Tokens:
    """Values of the n tokens of one response; arrays are [n]."""

    advantage: float  # of the response
    rollout_logprobs: np.ndarray  # float32
    logprobs: np.ndarray  # float32, of the given policy
    entropy: np.ndarray  # float32, nats
    kept: np.ndarray  # bool, False where the token loses its policy gradient
    causes: list[str]  # "clip", "veto", "not sampled" ..., joined by +; also for tokens that are bounded, but kept

    @property
    def ratios(self) -> np.ndarray:
        """Probability by the policy over that at rollout, float64."""
        return np.exp(self.logprobs.astype(np.float64) - self.rollout_logprobs)


def with_objective(recipe: Recipe, overrides: list[str]) -> Recipe:
    """``recipe`` with another ``[objective]``; `UserError` for overrides of anything else."""
    changed = override_recipe(recipe, overrides)
    if other := [line for line in recipe_diff(recipe, changed) if not line.startswith("objective.")]:
        raise UserError(f"--set may change only [objective] here: {other[0]}")
    return changed


def find_policy(run: RunDir, name: str | None, stage: Stage) -> Path:
    """The directory of a policy; `UserError` if there is none.

    name: ``final``, ``best``, the number of an update after which a policy was exported, or a Hugging Face directory.
    None: the policy after the last update of ``stage`` or, while it is not trained, the one that generated it.
    """
    if name is None:
        return require_policy(stage.next if stage.is_trained() else stage)
    place = {"final": run.final, "best": run.best}.get(name)
    if place is None and name.isdecimal() and int(name) <= run.recipe.schedule.total_updates:
        place = run.version(int(name))
        owner = run.stage(int(name) // run.recipe.schedule.updates_per_stage)
        if place == owner.policy:
            check_kept(owner)
    place = place or Path(name)
    if not (place / "config.json").is_file():
        own = [other.first_update for other in [*run.stages(), run.end] if other.policy.exists()]
        there = ", ".join(map(str, sorted({*own, *run.versions()})))
        raise UserError(f"--policy {name}: {place} is not a policy; exported ones: after update {there}; final, best")
    return place


def annotate(run: RunDir, found: Sequence[StoredResponse], recipe: Recipe, policy: str | None) -> list[Tokens]:
    """The `Tokens` of each of ``found``, with ``recipe``'s objective. policy: a name for `find_policy`."""
    table = recipe.objective
    objective = build_objective(table.definition, table.fields)
    whole = objective.needs_statistics or table.advantage not in GROUP_ADVANTAGES
    result: dict[tuple[int, int, int], Tokens] = {}
    for number in dict.fromkeys(one.stage for one in found):
        stage = run.stage(number)
        store = RolloutStore(stage.rollouts, one_policy=False)
        mine = [one for one in found if one.stage == number]
        scorer = _Scorer(stage, find_policy(run, policy, stage), objective)
        batches: dict[tuple[int, ...], list[StoredResponse]] = {}
        for one in mine:
            batches.setdefault(_batch_of(stage, store, one.prompt) if whole else (one.prompt,), []).append(one)
        for ids, members in batches.items():
            places = {(one.prompt, one.sample) for one in members}
            tokens = _judge(store.read(ids), None if whole else places, scorer, objective, table)
            result |= {(number, *place): tokens[place] for place in places}
    return [result[one.stage, one.prompt, one.sample] for one in found]


def _batch_of(stage: Stage, store: RolloutStore, prompt: int) -> tuple[int, ...]:
    """Ids of the groups in the optimizer batch that has ``prompt``."""
    if prompt not in store.chosen:
        raise UserError(f"prompt {prompt} was not chosen for training, so no optimizer batch has it")
    size, place = stage.run.recipe.schedule.prompts_per_update, list(store.chosen).index(prompt)
    return tuple(store.chosen[place // size * size : (place // size + 1) * size])


class _Scorer:
    """Scores responses of a stage with the policy, and with the other policies that the objective needs."""

    def __init__(self, stage: Stage, policy: Path, objective: Objective) -> None:
        self._temperature = stage.rollout.temperature
        self._models = {"logprobs": load_model(policy)}
        wanted = frozen_logprobs(objective, stage.run.recipe.schedule.sync_every)
        if "ref_logprobs" in wanted:
            self._models["ref_logprobs"] = load_model(stage.run.base)
        if "old_logprobs" in wanted:
            self._models["old_logprobs"] = load_model(require_policy(stage))

    def score(self, pairs: list[tuple[Group, Response]]) -> dict[str, Scores]:
        sequences = [[*group.prompt_tokens.tolist(), *one.tokens.tolist()] for group, one in pairs]
        lengths = [len(one.tokens) for _, one in pairs]
        found = {}
        for name, model in self._models.items():
            scores = score_with_entropy(model, sequences, self._temperature)
            found[name] = [(own[-n:], entropy[-n:]) for (own, entropy), n in zip(scores, lengths, strict=True)]
        # as in the first update of a step, which begins with its proximal policy
        return {"old_logprobs": found["logprobs"]} | found


def _judge(
    groups: list[Group],
    places: set[tuple[int, int]] | None,
    scorer: _Scorer,
    objective: Objective,
    table: ObjectiveTable,
) -> dict[tuple[int, int], Tokens]:
    """{(prompt, sample): Tokens} of the responses at ``places``, or of all responses of ``groups``.

    groups: an optimizer batch, or one group if the objective treats each response by itself.
    """

    def joined(arrays: Iterable[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(list(arrays)))

    rewards = rewards_of(groups)
    advantages = group_advantages(rewards, table.advantage)
    dropped = zero_variance(rewards) if table.zero_variance == "drop" else torch.zeros(len(groups), dtype=torch.bool)
    pairs = [
        (row, sample)
        for row, group in enumerate(groups)
        for sample in range(len(group.responses))
        if places is None or (group.group_id, sample) in places
    ]
    responses = [groups[row].responses[sample] for row, sample in pairs]
    scores = scorer.score([(groups[row], one) for (row, _), one in zip(pairs, responses, strict=True)])
    lengths = torch.tensor([len(one.tokens) for one in responses])
    sampled = joined(one.sampled for one in responses)
    fields: dict[str, Any] = {name: joined(own for own, _ in found) for name, found in scores.items()}
    batch = TokenBatch(
        **fields,
        rollout_logprobs=joined(one.rollout_logprobs for one in responses),
        entropy=joined(entropy for _, entropy in scores["logprobs"]),
        advantages=torch.stack([advantages[pair] for pair in pairs]).repeat_interleave(lengths),
        loss_mask=torch.stack([~dropped[row] for row, _ in pairs]).repeat_interleave(lengths) & sampled,
        cu_seqlens=torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32),
        sequence_index=torch.arange(len(pairs)),
    )
    terms = objective(batch)
    causes = [
        ("+".join(names) if trained else "zero variance" if own else "not sampled")
        for names, trained, own in zip(_names(terms), batch.loss_mask.tolist(), sampled.tolist(), strict=True)
    ]
    found: dict[tuple[int, int], Tokens] = {}
    spans = itertools.pairwise(batch.cu_seqlens.tolist())
    for pair, one, (own, entropy), (start, end) in zip(pairs, responses, scores["logprobs"], spans, strict=True):
        kept = terms.kept[start:end].numpy()
        tokens = Tokens(float(advantages[pair]), one.rollout_logprobs, own, entropy, kept, causes[start:end])
        found[groups[pair[0]].group_id, pair[1]] = tokens
    return found


def _names(terms: Terms) -> list[list[str]]:
    """The causes that flag each token."""
    flags = {name.removesuffix("_fraction"): where.tolist() for name, where in terms.flags.items()}
    return [[name for name, where in flags.items() if where[t]] for t in range(terms.kept.numel())]
