"""What a stranger may pack to do harm: each attack turns a packed stage into something that must be refused."""

import os
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.commands.stages.pack import MANIFEST, Manifest
from megarl.storage.checkpoints import FileSum
from tests.commands.stages.made_up import agree
from tests.faults.__main__ import flip

SHARD = "rollouts/00000.parquet"


def declared(name):
    """The manifest names a file that no stage has."""

    def attack(pack):
        manifest = Manifest.read(pack)
        replace(manifest, files=manifest.files | {name: FileSum(4, "0" * 64)}).write(pack)

    return attack


def pipe(pack):
    (pack / SHARD).unlink()
    os.mkfifo(pack / SHARD)


def with_recipe(section, **values):
    def attack(pack):
        recipe = Manifest.read(pack).recipe
        agree(pack, recipe=recipe | {section: recipe.get(section, {}) | values})

    return attack


def with_rows(change):
    """The first file of responses is what ``change`` makes of its table, and all checksums agree."""

    def attack(pack):
        pq.write_table(change(pq.read_table(pack / SHARD)), pack / SHARD)
        agree(pack)

    return attack


def column(name, change):
    """``change(entry)`` takes the place of each entry of a column."""

    def changed(table):
        place = table.schema.names.index(name)
        entries = list(map(change, table[name].to_pylist()))
        return table.set_column(place, name, pa.array(entries, table.schema.field(place).type))

    return with_rows(changed)


def beginning_with(value):
    return lambda entries: [value, *entries[1:]]


def not_parquet(pack):
    (pack / SHARD).write_bytes(b"PAR1" + b"\xff" * 2000 + b"PAR1")
    agree(pack)


ROWS = "has no valid rollouts: .*"
ATTACKS = {
    "a path to the parent directory": (declared("rollouts/../../evil"), "is not the name of a file"),
    "control characters": (declared("rollouts/\x1b[2J"), r"\\x1b"),
    "other bytes": (lambda pack: flip(pack / SHARD), "does not match its checksum"),
    "another manifest": (lambda pack: flip(pack / MANIFEST), "is not the manifest of a packed stage"),
    "a missing file": (lambda pack: (pack / SHARD).unlink(), "is missing"),
    "a link": (lambda pack: (pack / SHARD).symlink_to((pack / SHARD).rename(pack.parent / "outside")), "is a link"),
    "a pipe": (pipe, "no regular file"),
    "a file too many": (lambda pack: (pack / "policy/a.py").touch(), "'policy/a.py' is not in its manifest"),
    "no recipe": (lambda pack: agree(pack, recipe=[]), "has no recipe"),
    "a file of this machine": (with_recipe("data", train="/etc/passwd"), "not part of the packed stage"),
    "a reward of kind judge": (with_recipe("reward", kind="judge"), "are not packed: give yours with --set"),
    "an objective of Python": (with_recipe("objective", name="/tmp/x.py:X"), "'objective.name' of its author"),
    "a function of Python": (with_recipe("megatron", fp8_quantizer_factory="os.system"), "factory' of its author"),
    "other groups": (with_recipe("schedule", prompts_per_update=2), "has 8 groups, but its recipe trains 4"),
    "long responses": (with_recipe("rollout", max_response_tokens=1), "more than rollout.max_response_tokens"),
    "another policy": (lambda pack: agree(pack, weights_hash="0" * 64), f"{ROWS}groups of this policy"),
    "a log-prob that is no number": (column("rollout_logprobs", beginning_with(float("nan"))), f"{ROWS}log-probs"),
    "a reward beyond the limit": (column("reward", lambda _: -1e7), f"{ROWS}at most 1,000,000"),
    "a version beyond 32 bits": (column("policy_version", lambda _: 1 << 40), f"{ROWS}32 bits"),
    "an unknown token": (column("response_tokens", beginning_with(10**6)), f"{ROWS}outside the vocabulary"),
    "groups in disorder": (with_rows(lambda table: table.take([1, 0, *range(2, len(table))])), f"{ROWS}in order"),
    "a missing response": (with_rows(lambda table: table.slice(0, len(table) - 1)), "3 responses, not 4"),
    "one more column": (with_rows(lambda table: table.append_column("code", table["reward"])), ROWS),
    "no Parquet": (not_parquet, ROWS),
}
