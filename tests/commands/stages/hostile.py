"""What a stranger may pack to do harm: each attack turns a packed stage into something that must be refused."""

import io
import json
import os
import struct
import tarfile
import tomllib
import zlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import tomli_w

from megarl.commands.stages.pack import MANIFEST
from megarl.storage.checked_json import decode, write_checked
from megarl.storage.ledger import LEDGER, SEALED, parse, to_line
from tests.commands.stages.made_up import agree, sha


def declared(name):
    """The manifest names a file that no stage has."""

    def attack(copy, tmp_path):
        text = decode((copy / MANIFEST).read_bytes())
        text["files"][name] = {"bytes": 4, "sha256": "0" * 64}
        write_checked(copy / MANIFEST, text)
        return copy

    return attack


def cut_short(copy, tmp_path):
    path = next((copy / "rollouts").glob("*.arrow"))
    os.truncate(path, path.stat().st_size // 2)
    return copy


def other_bytes(copy, tmp_path):
    path = next((copy / "rollouts").glob("*.arrow"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    return copy


def longer(copy, tmp_path):
    with open(copy / "recipe.toml", "a") as file:
        file.write("#" * 1000)
    return copy


def link_inside(copy, tmp_path):
    (copy / "recipe.toml").rename(tmp_path / "outside.toml")
    (copy / "recipe.toml").symlink_to(tmp_path / "outside.toml")
    return copy


def linked_folder(copy, tmp_path):
    (copy / "rollouts").rename(tmp_path / "outside")
    (copy / "rollouts").symlink_to(tmp_path / "outside")
    return copy


def pipe(copy, tmp_path):
    (copy / "recipe.toml").unlink()
    os.mkfifo(copy / "recipe.toml")
    return copy


def gone(copy, tmp_path):
    (copy / "recipe.toml").unlink()
    return copy


def huge(copy, tmp_path):
    text = decode((copy / MANIFEST).read_bytes())
    text["files"]["recipe.toml"]["bytes"] = 1 << 62
    write_checked(copy / MANIFEST, text)
    return copy


def hard_link(copy, tmp_path):
    (copy / "recipe.toml").unlink()
    os.link("/etc/passwd", copy / "recipe.toml")
    return copy


def archived(copy, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        file.add(copy, ".")
    return tmp_path / "a.tar"


def no_manifest(copy, tmp_path):
    (copy / MANIFEST).write_text('{"format": 1}')
    return copy


def recipe_with(section, **values):
    def attack(copy, tmp_path):
        tables = tomllib.loads((copy / "recipe.toml").read_text())
        tables[section] |= values
        (copy / "recipe.toml").unlink()
        (copy / "recipe.toml").write_text(tomli_w.dumps(tables))
        agree(copy)
        return copy

    return attack


def reseal(copy, ledger=None, **fields):
    folder = copy / "rollouts"
    ledger = (folder / LEDGER).read_bytes() if ledger is None else ledger
    sealed = decode((folder / SEALED).read_bytes())
    for path in (folder / LEDGER, folder / SEALED):
        path.unlink()
    (folder / LEDGER).write_bytes(ledger)
    write_checked(folder / SEALED, sealed | {"ledger_sha256": sha(folder / LEDGER)} | fields)
    agree(copy)
    return copy


def rewritten_ledger(change):
    def attack(copy, tmp_path):
        folder = copy / "rollouts"
        first, *others = parse(folder / LEDGER)[0]
        return reseal(copy, b"".join(map(to_line, [change(first, folder), *others])))

    return attack


def chosen(*groups):
    return lambda copy, tmp_path: reseal(copy, chosen=groups)


def deep_ledger(copy, tmp_path):
    """The first line has a correct checksum, but is nested too deeply for a parser of JSON."""
    body = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000
    line = body + b', "crc": "%08x"}\n' % zlib.crc32(body)
    return reseal(copy, line + (copy / "rollouts" / LEDGER).read_bytes())


def policy_that_names(files):
    def attack(copy, tmp_path):
        path = copy / "policy/megarl.json"
        write_checked(path, decode(path.read_bytes()) | {"files": files})
        agree(copy)
        return copy

    return attack


def policy_with(**settings):
    def attack(copy, tmp_path):
        path = copy / "policy/config.json"
        config = json.loads(path.read_text()) | settings
        path.unlink()
        path.write_text(json.dumps(config))
        agree(copy)
        return copy

    return attack


def outside(entry, folder):
    return replace(entry, shard="../../../../etc/passwd")


def with_shard(change):
    """The first shard is replaced by what ``change`` makes of its batch, and all checksums agree."""

    def rewrite(entry, folder):
        path = folder / entry.shard
        with pa.memory_map(str(path)) as source:
            data = change(pa.ipc.open_file(source).get_batch(0))
        path.unlink()
        path.write_bytes(data)
        return replace(entry, bytes=len(data), sha256=sha(path))

    return rewritten_ledger(rewrite)


def to_file(batch, **options):
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as file:
        file.write_batch(batch)
    return sink.getvalue()


def compressed(batch):
    return to_file(batch, compression="zstd")


def bomb(batch):
    """A compressed shard of some KB, whose rows would take 512 MiB."""
    tokens = batch["response_tokens"]
    n = 1 << 27
    offsets = [*tokens.offsets.to_pylist()[:-1], n]
    many = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.zeros(n, np.int32)))
    return to_file(column(batch, "response_tokens", many), compression="zstd")


def far_length(batch):
    """A compressed buffer that claims to have 2^40 bytes."""
    data = bytearray(compressed(batch))
    length = struct.pack("<q", 4 * len(batch["response_tokens"].values))
    place = data.index(length + b"\x28\xb5\x2f\xfd")  # before the magic number of a zstd frame
    data[place : place + 8] = struct.pack("<q", 1 << 40)
    return bytes(data)


def far_version(batch):
    return to_file(column(batch, "policy_version", pa.array([1 << 40] * batch.num_rows, pa.int64())))


def column(batch, name, values):
    place = batch.schema.names.index(name)
    return batch.set_column(place, batch.schema.field(place), values)


def far_offsets(batch):
    tokens = batch["response_tokens"]
    wrong = tokens.offsets.to_numpy().copy()
    wrong[1] = 1 << 30
    buffers = [None, pa.py_buffer(wrong), *tokens.values.buffers()]
    broken = pa.ListArray.from_buffers(tokens.type, len(tokens), buffers[:2], children=[tokens.values])
    return to_file(column(batch, "response_tokens", broken))


def unknown_token(batch):
    tokens = batch["response_tokens"]
    values = tokens.values.to_numpy().copy()
    values[0] = 10**6
    return to_file(column(batch, "response_tokens", pa.ListArray.from_arrays(tokens.offsets, pa.array(values))))


def mixed_groups(batch):
    order = pa.array([1, 0, *range(2, batch.num_rows)])
    return to_file(batch.take(order))


def one_more_column(batch):
    return to_file(batch.append_column("code", pa.array(["x"] * batch.num_rows)))


def nulls(batch):
    return to_file(column(batch, "reward", pa.array([None] * batch.num_rows, pa.float64())))


def not_arrow(batch):
    return b"ARROW1\0\0" + b"\xff" * 2000


def other_policy(entry, folder):
    return replace(entry, weights_hash="0" * 64)


ATTACKS = {
    "a hard link": (hard_link, "its manifest says|does not match the checksum"),
    "a manifest with a path to the parent directory": (declared("rollouts/../../evil"), "is not allowed as the name"),
    "a manifest with an absolute path": (declared("/etc/passwd"), "is not allowed as the name"),
    "a manifest with code": (declared("policy/modeling.py"), "could contain code"),
    "a manifest with a pickle": (declared("policy/pytorch_model.bin"), "could contain code"),
    "control characters": (declared("rollouts/\x1b[2J"), r"\\x1b"),
    "cut short": (cut_short, "its manifest says"),
    "a shard with other bytes": (other_bytes, "does not match the checksum"),
    "a file with more bytes": (longer, "its manifest says"),
    "a link in a directory": (link_inside, "is a link"),
    "a linked folder": (linked_folder, "is a link"),
    "a pipe": (pipe, "is not a regular file"),
    "a missing file": (gone, "lacks recipe.toml"),
    "a huge size": (huge, "GiB left"),
    "a tar file": (archived, "is not the directory of a packed stage, .* lacks manifest.json"),
    "no manifest": (no_manifest, "unusable"),
    "a file of this machine": (recipe_with("data", train="/etc/passwd"), "not part of the packed stage"),
    "a reward of kind judge": (recipe_with("reward", kind="judge"), "are not packed"),
    "other groups": (recipe_with("schedule", prompts_per_update=2), "not those of its recipe"),
    "a ledger that points outside": (rewritten_ledger(outside), "not in its ledger|not part of it"),
    "another policy": (rewritten_ledger(other_policy), "another policy|was sampled with"),
    "a compressed shard of many rows": (with_shard(bomb), "is not a valid shard: .*(alloc|mmap)"),
    "a compressed buffer of terabytes": (with_shard(far_length), "is not a valid shard"),
    "a version beyond 32 bits": (with_shard(far_version), "32 bits"),
    "a group chosen twice": (chosen(0, 0, *range(1, 8)), "not those of its recipe"),
    "groups chosen in disorder": (chosen(1, 0, *range(2, 8)), "not those of its recipe"),
    "fractions of groups": (chosen(*map(float, range(8))), "not those of its recipe"),
    "a deeply nested ledger": (deep_ledger, "line 1 of .* is damaged"),
    "a policy that names a device": (policy_that_names({"/dev/zero": "0" * 64}), "does not name the files beside it"),
    "a policy with a file not packed": (policy_that_names({"a.txt": "0" * 64}), "not part of the packed stage"),
    "a policy whose files are a list": (policy_that_names(["a.txt"]), "does not name the files beside it"),
    "a policy without a vocabulary size": (policy_with(vocab_size="many"), "vocab_size = 'many'"),
    "a quantised policy": (
        policy_with(quantization_config={"quant_method": "mxfp4"}),
        "packs only weights that are not",
    ),
    "parts of a reward": (recipe_with("reward", parts=[1]), "is not a recipe"),
    "an objective of Python": (recipe_with("objective", path="/tmp/x.py:X"), "code of its author"),
    "an advantage of Python": (recipe_with("objective", advantage="x.py:f"), "code of its author"),
    "a list of objectives": (recipe_with("objective", path=["x.py:X"]), "code of its author"),
    "a function of Python": (recipe_with("megatron", fp8_quantizer_factory="os.system"), "could name code"),
    "a directory for logs": (recipe_with("megatron_optimizer", config_logger_dir="x"), "could name code"),
    "a path in a list of modules": (recipe_with("megatron", recompute_modules=["mlp", "/etc/x"]), "could name code"),
    "a table for Megatron": (recipe_with("megatron", quant_recipe={"x": 1}), "could name code"),
    "width in a template": (recipe_with("data", prompt_template="{prompt:>9999999999}"), "may only be plain names"),
    "attribute in a template": (recipe_with("data", prompt_template="{prompt.__class__}"), "may only be plain names"),
    "width in a template of a suite": (
        recipe_with("eval", data={"prompt_template": "{prompt:>99}"}),
        "may only be plain names",
    ),
    "a token budget": (recipe_with("rollout", token_budget=2, oversample=2.0), "token_budget"),
    "offsets beyond the file": (with_shard(far_offsets), "is not a valid shard"),
    "an unknown token": (with_shard(unknown_token), "outside the vocabulary"),
    "groups in disorder": (with_shard(mixed_groups), "in order"),
    "a column that no shard has": (with_shard(one_more_column), "with the columns of a shard"),
    "nulls": (with_shard(nulls), "is not a valid shard"),
    "a shard that is no Arrow file": (with_shard(not_arrow), "is not a valid shard"),
}
