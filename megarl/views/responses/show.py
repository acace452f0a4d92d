"""``megarl samples``: responses in a terminal or as JSON lines."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megarl.errors import UserError
from megarl.foreign import escape
from megarl.views.responses.select import Decode, Filter, StoredResponse, decoder, select, stages, title
from megarl.views.responses.text import shorten

if TYPE_CHECKING:
    from megarl.views.responses.tokens import Tokens

PANEL = 36  # columns of the terminal that each of several responses side by side gets, at least
# background colours of a 256-colour terminal, from little to much
_BELOW = (None, 153, 111, 69, 27)  # of ratios below 1, by their distance from 1 (_RATIO_STEPS)
_ABOVE = (None, 223, 216, 209, 196)
_HEAT = (None, 194, 190, 220, 208, 196)
_RATIO_STEPS = (0.05, 0.2, 0.7, 2.0)  # |log ratio|, nats
_ENTROPY_STEPS = (0.1, 0.5, 1.0, 2.0, 3.0)  # nats
_LOGPROB_STEPS = (0.1, 0.7, 2.3, 4.6, 9.2)  # -log p, nats: p of .9, .5, .1, .01, 1e-4
_LEGENDS = {
    "ratio": "policy / rollout: blue below 1, red above; steps at a factor of "
    + ", ".join(f"{math.exp(step):.2f}" for step in _RATIO_STEPS),
    "kept": "red: no gradient, with the reason in brackets at the first token; yellow: bounded, but keeps a gradient",
    "entropy": f"of the policy, nats; steps at {', '.join(map(str, _ENTROPY_STEPS))}",
    "logprob": f"of the policy, -log p in nats; steps at {', '.join(map(str, _LOGPROB_STEPS))}",
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
    """Print the first ``limit`` responses that meet ``wanted``; with ``wanted.prompt`` side by side.

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
    texts = (
        (one, _text(decode(one.prompt_tokens), whole), _body(one, tokens, decode, whole, colouring))
        for one, tokens in pairs
    )
    count = (_print_group if wanted.prompt is not None and wanted.sample is None else _print_list)(console, texts)
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


def _print_list(console: Console, texts: Iterator[tuple[StoredResponse, Text, Text]]) -> int:
    """Print responses, each with its prompt; returns their number."""
    count = 0
    for one, prompt, body in texts:
        count += 1
        place = f"stage {one.stage} · prompt {one.prompt} · sample {one.sample} · "
        console.print(Text(f"{place}{title(one)} · policy {one.response.policy_version}", style="bold"))
        # text of a model never begins a line, so that it cannot be taken for output of megarl
        table = Table.grid(padding=(0, 1))
        table.add_row(Text("  prompt", style="dim"), prompt)
        table.add_row(Text("response", style="dim"), body)
        console.print(table)
        console.print()
    return count


def _print_group(console: Console, texts: Iterator[tuple[StoredResponse, Text, Text]]) -> int:
    """Print the responses to one prompt, side by side; returns their number."""
    group = list(texts)
    if not group:
        return 0
    first, text, _ = group[0]
    header = Text(f"stage {first.stage} · prompt {first.prompt}", style="bold")
    prompt = Panel(text, title=header, title_align="left")
    beside = max(1, min(len(group), console.width // PANEL))
    panels: list[RenderableType] = [
        Panel(
            body,
            title=Text(f"{one.sample} · {title(one)}"),
            title_align="left",
            border_style="green" if one.response.correctness == 1 else "red",
        )
        for one, _, body in group
    ]
    console.print(Group(prompt, Columns(panels, width=console.width // beside - 1, padding=(0, 0))))
    return len(group)


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
    elif colouring == "ratio":
        for ratio in tokens.ratios.tolist():
            distance = abs(math.log(ratio)) if ratio > 0 else math.inf
            yield _style(distance, _RATIO_STEPS, _BELOW if ratio < 1 else _ABOVE)
    elif colouring == "entropy":
        for nats in tokens.entropy.tolist():
            yield _style(nats, _ENTROPY_STEPS, _HEAT)
    else:
        for logprob in tokens.logprobs.tolist():
            yield _style(-logprob, _LOGPROB_STEPS, _HEAT)


def _style(value: float, steps: tuple[float, ...], colours: tuple[int | None, ...]) -> str:
    colour = colours[sum(value >= step for step in steps)]
    return "" if colour is None else f"black on color({colour})"
