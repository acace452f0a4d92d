"""The dataset card (README.md) of a packed stage: what it is, its licence, how to use it, and its checksums."""

from __future__ import annotations

from typing import Any

from megarl.commands.stages.packed import Manifest
from megarl.recipe.tables import Recipe
from megarl.storage.rollouts import RolloutStore

_CARD = """---
license: {licence}
pretty_name: {name}
tags:
- megarl
- reinforcement-learning
---

# {name}

Frozen rollouts of a language model: all responses of one stage of a megarl run, each with its tokens, the log-probs at
which they were sampled, its reward, and the version of the policy that sampled it.

| | |
|---|---|
{rows}

```sh
megarl stage unpack THIS runs/{name}{model_option}     # every checksum is verified
megarl samples runs/{name}                # what the model wrote
megarl optimize runs/{name} --stage {stage} --output runs/grpo --set objective.name=grpo
```

`rollouts/*.arrow` are Arrow IPC files, one row per response; `manifest.json` has the checksum of every file{prompts}.
"""


def write_card(manifest: Manifest, store: RolloutStore, recipe: Recipe, name: str) -> str:
    """The text of README.md, with the metadata that the Hugging Face Hub reads. name: of the run."""
    entries = store.entries
    responses, tokens = sum(e.responses for e in entries), sum(e.tokens for e in entries)
    rewards, engine = sum(entry.reward_sum for entry in entries), recipe.rollout_of(manifest.stage).engine
    facts: dict[str, Any] = {
        "stage": f"{manifest.stage}, policy after {manifest.stage * recipe.schedule.updates_per_stage} updates",
        "base model": manifest.model,
        "prompts (groups)": f"{len(store.group_ids):,}",
        "responses": f"{responses:,}",
        "response tokens": f"{tokens:,}",
        "mean reward": f"{rewards / max(1, responses):.4f}",
        "temperature": recipe.rollout.temperature,
        "engine, log-probs": f"{engine}, {entries[0].logprob_mode if entries else '-'}",
        "licence": manifest.licence,
        "weights": "included" if manifest.has_weights else "not included",
        "sha256 of the weights": f"`{manifest.weights_hash}`",
        "sha256 of the ledger": f"`{manifest.files['rollouts/ledger.jsonl'].sha256}`",
    }
    absent = [name for name in manifest.prompts if f"files/{name}" not in manifest.files]
    return _CARD.format(
        licence=manifest.licence,
        name=name,
        stage=manifest.stage,
        rows="\n".join(f"| {key} | {value} |" for key, value in facts.items()),
        model_option="" if manifest.has_weights else " --model PATH",
        prompts=f", and of {len(absent)} prompt files that are not included" if absent else "",
    )
