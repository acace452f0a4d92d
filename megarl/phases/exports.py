"""The policies of a stage as Hugging Face directories, each with text of the run by which engines are judged."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megarl.actor import hf, parallel, reference
from megarl.actor.optimizer import gather_parameters
from megarl.actor.step import Actor
from megarl.beats import beat
from megarl.storage.files import make_directory
from megarl.storage.reference_logprobs import Reference, cut_text, read_reference, write_reference
from megarl.storage.rollouts import Group, Response
from megarl.storage.run_dir import Stage


class Exporter:
    """Exports the policies of ``stage`` from an actor that has made its first ``done`` updates.

    The text is that of the stage's first update: prompts with their responses. The stage's own policy scores it before
    that update, so that each export says what the policy before it made of the same text.
    """

    def __init__(self, actor: Actor, stage: Stage, done: int) -> None:
        self.actor, self.stage, self._done = actor, stage, done
        found: list[Any] = [None]
        if dist.get_rank() == 0:  # for everybody: others may see a shared file system as it was a moment ago
            found = [read_reference(stage.directory)]
        dist.broadcast_object_list(found, src=0)
        self._begun: Reference | None = found[0]
        self._unknown = self._begun is None and done > 0  # what the stage's own policy makes of the text

    def see(self, groups: list[Group]) -> None:
        """Groups that are about to be trained; the first ones become the text. Collective."""
        if self._begun is not None:
            return
        table, data = self.stage.run.recipe.rollout, self.stage.run.recipe.data
        chosen = [(g, g.responses[k]) for k in range(table.responses_per_prompt) for g in groups]
        texts = ([*g.prompt_tokens.tolist(), *r.tokens.tolist()] for g, r in chosen)
        text = cut_text(texts, data.max_prompt_tokens + table.max_response_tokens)
        if not text:
            return
        scores = self._score(text)
        precision = hf.precision(self.actor.models[0], self.stage.run.base)
        self._begun = Reference(text, scores, precision)
        if self._done == 0:  # later the weights are none that were ever exported
            stored = _stored(text, chosen, self.stage.first_update) if table.temperature == 1 else None
            self._begun = replace(self._begun, stored=stored)
            if dist.get_rank() == 0:
                make_directory(self.stage.directory)
                write_reference(self.stage.directory, self._begun)

    def export(self, version: int, target: Path) -> None:
        """Write the policy after ``version`` updates of the run. Collective."""
        run, start, judged = self.stage.run, time.perf_counter(), None
        beat("export", f"the export after update {version}")
        gather_parameters(self.actor.replicas)
        if self._begun is not None:
            scores = self._score(self._begun.sequences)
            judged = replace(self._before(version, self._begun), logprobs=scores)
        hf.export_hf(self.actor.models, target, run.base, version, judged)
        if parallel.reports_metrics():
            policy, seconds = str(target.relative_to(run.root)), round(time.perf_counter() - start, 3)
            run.log_event("export", policy=policy, version=version, seconds=seconds)

    def _score(self, text: list[list[int]]) -> list[np.ndarray]:
        budget = self.stage.run.recipe.actor.tokens_per_micro_batch
        gather_parameters(self.actor.replicas)
        return reference.score(self.actor.models, text, budget, self.actor.device)

    def _before(self, version: int, begun: Reference) -> Reference:
        """With the policy that an engine may still have, the last one exported before ``version``, as the previous."""
        run = self.stage.run
        for earlier in reversed([v for v in run.versions() if self.stage.first_update < v < version]):
            found = read_reference(run.version(earlier))
            if found is not None and found.sequences == begun.sequences:
                return replace(begun, previous=found.logprobs, stored=None)
        return replace(begun, previous=None if self._unknown else begun.logprobs)


def _stored(text: list[list[int]], chosen: list[tuple[Group, Response]], version: int) -> list[np.ndarray]:
    """What the engine stored of the responses in the text; nothing of one that not ``version`` alone sampled."""
    logprobs = []
    for tokens, (group, response) in zip(text, chosen, strict=False):
        cut = max(0, len(tokens) - len(group.prompt_tokens))
        own = bool((response.versions[:cut] == version).all()) and response.loss_mask is None
        logprobs.append(np.array(response.rollout_logprobs[: cut if own else 0], np.float32))
    return logprobs
