"""Synthetic run directories with given responses, written by megarl's own writer, and a tokenizer of a few words."""

import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models

from megarl.storage.rollouts import Group, Response, RolloutWriter, seal
from tests.views.synthetic_run import make_run

HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07",  # clears a terminal and names its window
    "\x9b31m",  # the same kind of sequence in one character
    "\rhidden\b\x7f\x00",
    "\u202eesrever\u2028",
    "\nstage 9 · prompt 9 · sample 9 · reward 1 · 1 tokens · stop · policy 9",
    "<img src=http://example.com/x.png onerror=alert(1)>",
    "</pre></template></details><script>alert(2)</script><!--",
    "[bold red]:smile:[/bold red]",
)
WORDS = ("<eos>", "a", " b", " c", " answer", "\n", *HOSTILE)


def write_words(folder: Path) -> None:
    """A tokenizer whose tokens are `WORDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def response(tokens, reward=0.0, finish="stop", version=0, **fields) -> Response:
    tokens = np.array(tokens, np.int32)
    logprobs = -0.1 * np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Response(tokens, logprobs, reward, finish, version, **fields)


def random_groups(ids, samples=4, seed=0) -> list[Group]:
    noise, prompt = random.Random(seed), np.array([1, 2], np.int32)

    def one() -> Response:
        tokens = [noise.randrange(1, 6) for _ in range(noise.randrange(1, 20))]
        finish = noise.choice(["stop", "stop", "length", "timeout"])
        return response(tokens, noise.choice([0.0, 0.25, 1.0]), finish, seed)

    return [Group(number, prompt, tuple(one() for _ in range(samples))) for number in ids]


def store(directory: Path, shards: list[list[Group]], sealed: bool = True) -> None:
    with RolloutWriter(directory, weights_hash="w" * 64, logprob_mode="processed") as writer:
        for shard in shards:
            writer.append(shard)
    if sealed:
        ids = [group.group_id for shard in shards for group in shard]
        seal(directory, range(min(ids), max(ids) + 1))


def make_stored_run(root: Path, stages: list[list[list[Group]]], **options) -> Path:
    """A run with all updates, whose stages have these shards; a shard is a list of groups."""
    make_run(root, **options)
    write_words(root / "stages/000/policy")
    for number, shards in enumerate(stages):
        store(root / f"stages/{number:03d}/rollouts", shards)
    return root


def two_stages(root: Path) -> tuple[Path, list[tuple[int, Group]]]:
    """(a run with rollouts of two stages in two shards each, all its groups as (stage, group))."""
    shards = [[random_groups(range(first, first + 3), seed=first) for first in pair] for pair in ((0, 3), (6, 9))]
    groups = [(stage, group) for stage, pair in enumerate(shards) for shard in pair for group in shard]
    return make_stored_run(root, shards), groups
