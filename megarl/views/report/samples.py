"""The report's samples: some responses of each stage, which the browser lays out only when they are opened."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.errors import UserError
from megarl.foreign import escape, quoted
from megarl.storage.rollouts import RolloutStore
from megarl.views.responses.select import Decode, StoredResponse, decoder, open_shard, stages, title
from megarl.views.responses.text import shorten

BYTES = 250_000  # of all samples on a page, at most
STAGES, PROMPTS = 12, 3  # stages per run and prompts per stage, spread evenly
CHARACTERS = 1600  # of a text; the middle of longer ones is left out


def samples_section(runs: Sequence[tuple[str, Path]]) -> str:
    """HTML with samples of the runs (name, directory); for a run whose responses cannot be read it says why."""
    parts, left = [], BYTES
    for name, root in runs:
        heading = f"{html.escape(name)}, " if len(runs) > 1 else ""
        try:
            for part in _of_run(root, heading, min(left, BYTES // len(runs))):
                parts.append(part)
                left -= len(part.encode())
        except (UserError, OSError) as error:
            parts.append(f"<p>{heading}samples could not be read: {html.escape(str(error))}</p>")
    return f'<h3>Samples</h3><div id="samples">{"".join(parts)}</div>' if parts else ""


def _of_run(root: Path, heading: str, left: int) -> Iterator[str]:
    there = stages(root)
    if not there:
        return
    decode = decoder(root)
    for number in _spread(sorted(there), STAGES):
        store = RolloutStore(there[number], one_policy=False)
        if not store.entries:
            continue
        responses, rewards = (sum(getattr(e, name) for e in store.entries) for name in ("responses", "reward_sum"))
        summary = f"{heading}stage {number + 1}: {responses:,} responses, mean reward {rewards / responses:.3f}"
        body = "".join(_sample(one, decode) for one in _chosen(number, there[number], store))
        part = f'<details class="samples"><summary>{summary}</summary><template>{body}</template></details>'
        left -= len(part.encode())
        if left < 0:
            yield f"<p>{heading}for stages from {number + 1} on use: megarl samples {html.escape(quoted(root))}</p>"
            return
        yield part


def _chosen(stage: int, directory: Path, store: RolloutStore) -> Iterator[StoredResponse]:
    """For some prompts of a stage, the responses with the lowest and with the highest reward."""
    for prompt in _spread(store.group_ids, PROMPTS):
        entry = next(entry for entry in store.entries if prompt in entry.groups)
        group = open_shard(directory, entry).group(prompt)
        order = sorted(range(len(group.responses)), key=lambda sample: group.responses[sample].reward)
        for sample in dict.fromkeys((order[0], order[-1])):
            yield StoredResponse(stage, prompt, sample, group.prompt_tokens, group.responses[sample], group.columns)


def _spread(items: list[int], count: int) -> list[int]:
    """At most ``count`` of the items, evenly spread, with the first and the last."""
    if len(items) <= count:
        return items
    return [items[place * (len(items) - 1) // (count - 1)] for place in range(count)]


def _sample(one: StoredResponse, decode: Decode) -> str:
    prompt, text = (
        html.escape(escape(shorten(decode(tokens), CHARACTERS))) for tokens in (one.prompt_tokens, one.response.tokens)
    )
    return (
        f"<h4>prompt {one.prompt} · sample {one.sample} · {html.escape(title(one))}</h4>"
        f'<pre class="prompt">{prompt}</pre><pre>{text}</pre>'
    )
