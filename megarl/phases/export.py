"""Exports policies as Hugging Face files: of a stage while it is trained, and of its checkpoints in the export phase.

While a stage is trained, each export has a reference against which engines are checked: text of the run with the
log-probs that the exporting actor gives it. An engine that has loaded the export must score the text alike
(`megarl.rollout.drift`).
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from megarl.actor import checkpoint, hf, parallel, peft, reference
from megarl.actor.optimizer import gather_parameters
from megarl.actor.step import Actor
from megarl.errors import UserError
from megarl.heartbeats import beat
from megarl.storage.checkpoints import checkpoints
from megarl.storage.files import make_directory
from megarl.storage.policies import PolicyInfo, Reference, cut_text, read_reference, write_reference
from megarl.storage.rollouts import Group, Response
from megarl.storage.run_dir import Stage, checks


def export(stage: Stage) -> None:
    """The export phase: write the policy, or its adapters, after the request's ``update`` updates of the stage.

    A single process holds the whole model and makes no update.
    """
    request = stage.run.read_request()
    device = parallel.initialize(stage.run.recipe)
    actor = Actor.build(stage.run.recipe, stage.run.base, device, load=False)
    load_policy(actor, stage, request["update"])
    updates, target = request["update"], Path(request["output"])
    if request["adapters"]:
        beat("export", target.name)
        lora, base = actor.recipe.actor.lora, actor.recipe.model.path
        assert lora is not None
        peft.export_adapters(actor.models, target, lora, base, actor.base, stage.first_update + updates)
    else:
        write_policy(actor, stage, updates, target)
    stage.run.write_answer([])


def load_policy(actor: Actor, stage: Stage, updates: int) -> None:
    """Load the policy after ``updates`` updates of the stage into the actor; `UserError` if its files are damaged or
    gone."""
    path = dict(checkpoints(stage.checkpoints)).get(updates)
    if updates and path is not None:
        beat("load", path.name)
        if damage := checkpoint.verify(path):
            raise UserError(f"{path} is damaged: {damage}")
        checkpoint.load(actor, path)
    elif updates not in (0, stage.run.recipe.schedule.updates_per_stage):
        raise UserError(f"{stage.checkpoints} has no checkpoint of update {updates} any more: see actor.keep_stages")
    else:  # the stage's first policy, or its last one if its checkpoints are gone; new adapters do not change either
        policy = stage.next.policy if updates else stage.policy
        checks.check(policy, "Restore it from a copy")
        hf.load_hf(actor.models, policy)
    gather_parameters(actor.replicas)


def write_policy(actor: Actor, stage: Stage, updates: int, target: Path) -> PolicyInfo:
    """Export the actor's policy, that after ``updates`` updates of the stage, to the directory ``target``."""
    beat("export", target.name)
    shutil.rmtree(target, ignore_errors=True)
    return hf.export_hf(actor.models, target, stage.run.base, stage.first_update + updates)


class Exporter:
    """Exports the policies of ``stage`` from an actor.

    The reference text is from the stage's first update: prompts with their responses. The stage's own policy scores it
    before that update, so that each export can also give the log-probs of the policy before it, on the same text.
    """

    def __init__(self, actor: Actor, stage: Stage) -> None:
        self.actor, self.stage = actor, stage
        self._budget = stage.run.recipe.actor.tokens_per_micro_batch
        # only rank 0 reads: other nodes may see an older state of a shared file system
        found = [read_reference(stage.directory) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        self._reference = found[0]

    def observe(self, groups: list[Group]) -> None:
        """Take the reference text from the groups of the stage's first update, unless there is one. Collective."""
        if self._reference is not None:
            return
        table, data = self.stage.run.recipe.rollout, self.stage.run.recipe.data
        chosen = [(g, g.responses[k]) for k in range(table.responses_per_prompt) for g in groups]
        texts = ([*g.prompt_tokens.tolist(), *r.tokens.tolist()] for g, r in chosen)
        text = cut_text(texts, data.max_prompt_tokens + table.max_response_tokens)
        if not text:
            return
        model = self.actor.models[0]
        precision, experts = hf.precision(model, self.stage.run.base), model.config.num_moe_experts is not None
        stored = _stored(text, chosen, self.stage.first_update) if table.temperature == 1 else None
        self._reference = Reference(text, self._score(text), precision, stored=stored, experts=experts)
        if dist.get_rank() == 0:
            make_directory(self.stage.directory)
            write_reference(self.stage.directory, self._reference)

    def export(self, version: int, target: Path) -> None:
        """Export the policy after ``version`` updates of the run, with its reference, to ``target``. Collective."""
        run, start, judged = self.stage.run, time.perf_counter(), None
        beat("export", f"the export after update {version}")
        gather_parameters(self.actor.replicas)
        if self._reference is not None:
            scores = self._score(self._reference.sequences)
            judged = replace(self._before(version, self._reference), logprobs=scores)
        hf.export_hf(self.actor.models, target, run.base, version, judged)
        if parallel.reports_metrics():
            policy, seconds = str(target.relative_to(run.root)), round(time.perf_counter() - start, 3)
            run.log_event("export", policy=policy, version=version, seconds=seconds)

    def _score(self, text: list[list[int]]) -> list[np.ndarray]:
        gather_parameters(self.actor.replicas)
        return reference.score(self.actor.models, text, self._budget, self.actor.device)

    def _before(self, version: int, current: Reference) -> Reference:
        """``current`` with the log-probs of the last policy that was exported before ``version`` as `previous`.

        An engine that failed to load ``version`` may still have that policy.
        """
        run = self.stage.run
        for earlier in reversed([v for v in run.versions() if self.stage.first_update < v < version]):
            found = read_reference(run.version(earlier))
            if found is not None and found.sequences == current.sequences:
                return replace(current, previous=found.logprobs, stored=None)
        return replace(current, previous=current.logprobs)


def _stored(text: list[list[int]], chosen: list[tuple[Group, Response]], version: int) -> list[np.ndarray]:
    """The log-probs that the engine stored for the responses in the text, [tokens of the response] float32 each.

    Empty for a response of which not all tokens were sampled by policy ``version``.
    """
    logprobs = []
    for tokens, (group, response) in zip(text, chosen, strict=False):
        cut = max(0, len(tokens) - len(group.prompt_tokens))
        own = bool((response.versions[:cut] == version).all()) and response.loss_mask is None
        logprobs.append(np.array(response.rollout_logprobs[: cut if own else 0], np.float32))
    return logprobs
