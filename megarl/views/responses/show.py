"""``megarl samples``: responses in a terminal or as JSON lines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.errors import UserError
from megarl.foreign import escape
from megarl.views.responses.select import Decode, Filter, StoredResponse, decoder, select, stages, title
from megarl.views.responses.text import shorten

if TYPE_CHECKING:
    from megarl.views.responses.tokens import Tokens

_HEAT = (None, 194, 190, 220, 208, 196)  # background colours of a 256-colour terminal, from little to much
# colouring -> steps, and the colours before, between and after them
_SCALES: dict[str, tuple[tuple[float, ...], tuple[int | None, ...]]] = {
    "ratio": ((-2.0, -0.7, -0.2, -0.05, 0.05, 0.2, 0.7, 2.0), (27, 69, 111, 153, None, 223, 216, 209, 196)),
    "entropy": ((0.1, 0.5, 1.0, 2.0, 3.0), _HEAT),
    "logprob": ((0.1, 0.7, 2.3, 4.6, 9.2), _HEAT),
}
_LEGENDS = {
    "ratio": "log of policy / rollout: blue below 0, red above; steps at .05, .2, .7 and 2 nats",
    "kept": "red: no gradient, with the reason in brackets at the first token; yellow: bounded, but keeps a gradient",
    "entropy": "of the policy; steps at .1, .5, 1, 2 and 3 nats",
    "logprob": "of the policy, -log p; steps at .1, .7, 2.3, 4.6 and 9.2 nats",
}


def show_samples(
    root: Path,
    wanted: Filter,
    limit: int,
    *,
    as_json: bool,
    whole: bool = False,
    colouring: str | None = None,
    policy: str | None = None,
    overrides: list[str] | None = None,
    console: Console | None = None,
) -> None:
    """Print the first ``limit`` responses that meet ``wanted``.

    Args:
        whole: print long texts uncut.
        colouring: one of `megarl.views.responses.COLOURINGS`, by which tokens are coloured, with the log-probs of
            ``policy`` and an objective with ``overrides``. JSON lines then have every token.
    """
    stages(root)  # raises for a directory that is not a run, before its recipe is read
    decode = decoder(root)
    found = itertools.islice(select(root, wanted, decode), limit)
    if colouring is None:
        if policy or overrides:
            raise UserError("--policy and --set only change how tokens are coloured: give --tokens with them")
        pairs: Iterator[tuple[StoredResponse, Tokens | None]] = ((one, None) for one in found)
    else:
        chosen = list(found)  # first, since torch and transformers take seconds
        from megarl.storage.run_dir import RunDir
        from megarl.views.responses.tokens import annotate, with_objective

        run = RunDir.open(root)
        pairs = zip(chosen, annotate(run, chosen, with_objective(run.recipe, overrides or []), policy), strict=True)
    if as_json:
        for one, tokens in pairs:
            print(json.dumps(as_record(one, decode, tokens)))
        return
    console = console or Console(highlight=False, markup=False, emoji=False)
    count = 0
    for one, tokens in pairs:
        count += 1
        place = f"stage {one.stage} · prompt {one.prompt} · sample {one.sample} · "
        console.print(Text(f"{place}{title(one)} · policy {one.response.policy_version}", style="bold"))
        # text of a model never begins a line, so that it cannot be taken for output of megarl
        table = Table.grid(padding=(0, 1))
        table.add_row(Text("  prompt", style="dim"), _text(decode(one.prompt_tokens), whole))
        table.add_row(Text("response", style="dim"), _body(one, tokens, decode, whole, colouring))
        console.print(table)
        console.print()
    if colouring is not None and count:
        console.print(Text(f"{colouring}: {_LEGENDS[colouring]}", style="dim"))
    if count == limit:
        console.print(Text(f"the first {limit}; --limit shows more", style="dim"))
    if not count:
        console.print(Text("no response is like that", style="dim"))


def as_record(one: StoredResponse, decode: Decode, tokens: Tokens | None = None) -> dict[str, Any]:
    """A response as an object for JSON; with ``tokens`` also all its tokens."""
    response = one.response
    record: dict[str, Any] = {
        "stage": one.stage,
        "prompt": one.prompt,
        "sample": one.sample,
        "reward": response.reward,
        "correct": response.correctness,
        "finish_reason": response.finish_reason,
        "policy_version": response.policy_version,
        "prompt_tokens": len(one.prompt_tokens),
        "response_tokens": len(response.tokens),
        "row": one.columns,
        "prompt_text": decode(one.prompt_tokens),
        "text": decode(response.tokens),
    }
    if response.loss_mask is not None:
        record["loss_mask"] = response.loss_mask.tolist()
    if tokens is not None:
        columns = {
            "id": response.tokens,
            "rollout_logprob": tokens.rollout_logprobs,
            "logprob": tokens.logprobs,
            "ratio": tokens.ratios,
            "entropy": tokens.entropy,
            "kept": tokens.kept,
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        record["advantage"] = tokens.advantage
        record["tokens"] = [
            dict(zip(columns, row, strict=True)) | {"text": decode(response.tokens[place : place + 1]), "cause": cause}
            for place, (row, cause) in enumerate(zip(rows, tokens.causes, strict=True))
        ]
    return record


def _text(text: str, whole: bool) -> Text:
    return Text(escape(text if whole else shorten(text)), overflow="fold")


def _body(one: StoredResponse, tokens: Tokens | None, decode: Decode, whole: bool, colouring: str | None) -> Text:
    if tokens is None or colouring is None:
        return _text(decode(one.response.tokens), whole)
    text, before = Text(overflow="fold"), ""
    for place, (style, cause) in enumerate(zip(_styles(tokens, colouring), tokens.causes, strict=True)):
        if colouring == "kept" and cause and cause != before:
            text.append(f"[{cause}]", style="italic dim")
        before = cause
        text.append(escape(decode(one.response.tokens[place : place + 1])), style=style)
    return text


def _styles(tokens: Tokens, colouring: str) -> Iterator[str]:
    if colouring == "kept":
        for kept, cause in zip(tokens.kept.tolist(), tokens.causes, strict=True):
            yield "black on color(203)" if not kept else "black on color(228)" if cause else ""
        return
    (steps, colours), log_ratio = _SCALES[colouring], tokens.logprobs - tokens.rollout_logprobs
    values = {"ratio": log_ratio, "entropy": tokens.entropy, "logprob": -tokens.logprobs}[colouring]
    for place in np.digitize(values, steps):
        yield "" if colours[place] is None else f"black on color({colours[place]})"
