"""Stages that travel: what was packed elsewhere is optimized to the same bytes, and hostile ones are refused."""

import io
import json
import os
import shutil
import struct
import tarfile
import tomllib
import zlib
from dataclasses import replace

import pyarrow as pa
import pytest
import tomli_w

from megarl.errors import UserError
from megarl.recipe.load import read_tables
from megarl.stages.pack import pack
from megarl.stages.packed import MANIFEST, Source
from megarl.stages.unpack import unpack
from megarl.storage.checked_json import decode, write_checked
from megarl.storage.ledger import LEDGER, SEALED, parse, to_line
from megarl.storage.policies import check_policy
from megarl.storage.run_dir import RunDir
from megarl.storage.weights import INDEX_FILE, weight_files
from megarl.views.audit import audit
from tests.helpers import megarl, read_lines
from tests.stages.made_up import agree, archive, entry, fill, make_run, sha, sums

LICENCE = "cc-by-4.0"


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    """Of a recipe whose prompt file and model only this fixture knows."""
    folder = tmp_path_factory.mktemp("travel")
    prompts = shutil.copy(recipe.parent / "prompts.jsonl", folder / "my prompts.jsonl")
    text = recipe.read_text().replace(str(recipe.parent / "prompts.jsonl"), str(prompts))
    (folder / "recipe.toml").write_text(text)
    return make_run(folder / "recipe.toml", folder / "run")


@pytest.fixture(scope="module")
def packed(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed") / "stage"
    pack(run.root, 0, folder, LICENCE, weights=False, prompts=True)
    return folder


@pytest.fixture
def copy(packed, tmp_path):
    """A packed stage that a test may damage; not by hard links to the run."""
    return shutil.copytree(packed, tmp_path / "copy")


def optimize(*arguments):
    result = megarl("optimize", *arguments)
    assert result.returncode == 0, result.stderr
    return result


def updates(run):
    """metrics.jsonl without times."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in read_lines(run / "metrics.jsonl")]


def test_a_stage_that_travelled_is_optimized_to_the_same_bytes(run, tmp_path, guessing_model):
    optimize(run.root, "--stage", 0, "--output", tmp_path / "a", "--set", "objective.name=grpo")
    assert pack(run.root, 0, tmp_path / "stage.tar", LICENCE, weights=False, prompts=True).has_weights is False
    hidden = run.recipe.data.train + ".gone"  # what is packed must not need what lies on this machine
    os.rename(run.recipe.data.train, hidden)
    try:
        told = megarl("stage", "unpack", tmp_path / "stage.tar", tmp_path / "b", "--model", guessing_model)
        assert told.returncode == 0, told.stderr
        assert "cc-by-4.0" in told.stdout
        optimize(tmp_path / "b", "--stage", 0, "--output", tmp_path / "d", "--set", "objective.name=grpo")
    finally:
        os.rename(hidden, run.recipe.data.train)
    weights = "stages/001/policy/model.safetensors"
    assert sha(tmp_path / "a" / weights) == sha(tmp_path / "d" / weights)
    assert updates(tmp_path / "a") == updates(tmp_path / "d")
    assert sha(tmp_path / "a" / weights) != sha(guessing_model / "model.safetensors")
    found = audit(tmp_path / "b", 0)
    assert found.problems == []


def test_a_later_stage_travels_with_its_optimizer(run, tmp_path):
    root = shutil.copytree(run.root, tmp_path / "run")
    optimize(root, "--stage", 0)
    fill(RunDir.open(root).stage(1))
    assert pack(root, 1, tmp_path / "packed", LICENCE, weights=False, prompts=False).has_weights
    optimize(root, "--stage", 1)
    refused = megarl("stage", "unpack", tmp_path / "packed", tmp_path / "b")
    assert refused.returncode == 2 and "--prompts FILE" in refused.stderr
    unpack(tmp_path / "packed", tmp_path / "b", None, [run.root.parent / "my prompts.jsonl"])
    optimize(tmp_path / "b", "--stage", 1)
    assert sha(root / "final/model.safetensors") == sha(tmp_path / "b/final/model.safetensors")
    assert updates(root)[2:] == updates(tmp_path / "b")


def test_nothing_of_this_machine_is_packed(packed, run):
    text = (packed / "recipe.toml").read_text() + (packed / "README.md").read_text()
    assert str(run.root.parent) not in text and str(run.recipe.model.path) not in text
    card = (packed / "README.md").read_text()
    manifest = Source(packed).manifest
    assert card.startswith("---\nlicense: cc-by-4.0\n")
    assert manifest.weights_hash in card and manifest.files[f"rollouts/{LEDGER}"].sha256 in card
    assert list(manifest.prompts) == [f"{sha(run.root.parent / 'my prompts.jsonl')[:12]}_my_prompts.jsonl"]


def test_other_weights_are_refused(packed, tiny_model, tmp_path):
    with pytest.raises(UserError, match="other weights"):
        unpack(packed, tmp_path / "b", tiny_model, [])
    assert not (tmp_path / "b").exists()


def test_without_weights_it_can_be_read(packed, tmp_path):
    unpack(packed, tmp_path / "b", None, [])
    told = megarl("samples", tmp_path / "b", "--limit", 1, "--json")
    assert json.loads(told.stdout)["prompt"] == 0
    refused = megarl("optimize", tmp_path / "b", "--stage", 0)
    assert refused.returncode == 2 and "safetensors" in refused.stderr


def members(folder):
    """The entries of an archive of a packed directory, the manifest first."""
    names = [MANIFEST, *Source(folder).manifest.files]
    return {name: entry(name, (folder / name).read_bytes()) for name in names}


def repeated_size(copy, tmp_path):
    """An extended header that promises more than there is memory for."""
    parts = members(copy)
    huge = entry("x", b"30 path=recipe.toml\n", type=tarfile.XHDTYPE)
    return archive(tmp_path / "a.tar", parts.pop(MANIFEST), huge, *parts.values())


def of_type(kind, name="recipe.toml", **fields):
    def attack(copy, tmp_path):
        parts = members(copy)
        parts[name] = entry(name, type=kind, **fields)
        return archive(tmp_path / "a.tar", *parts.values())

    return attack


def named(name):
    def attack(copy, tmp_path):
        return archive(tmp_path / "a.tar", *members(copy).values(), entry(name, b"evil"))

    return attack


def declared(name):
    """In the manifest too."""

    def attack(copy, tmp_path):
        text = decode((copy / MANIFEST).read_bytes())
        text["files"][name] = {"bytes": 4, "sha256": "0" * 64}
        write_checked(copy / MANIFEST, text)
        return copy

    return attack


def twice(copy, tmp_path):
    parts = list(members(copy).values())
    return archive(tmp_path / "a.tar", *parts, parts[0])


def cut_short(copy, tmp_path):
    path = archive(tmp_path / "a.tar", *members(copy).values())
    os.truncate(path, path.stat().st_size // 2)
    return path


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


def gzipped(copy, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz") as file:
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
    """A line with a right checksum that no parser of JSON follows to its end."""
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


def no_vocabulary(copy, tmp_path):
    path = copy / "policy/config.json"
    config = json.loads(path.read_text()) | {"vocab_size": "many"}
    path.unlink()
    path.write_text(json.dumps(config))
    agree(copy)
    return copy


def outside(entry, folder):
    return replace(entry, shard="../../../../etc/passwd")


def with_shard(change):
    """Every shard replaced by what ``change`` makes of its batch, with checksums that agree."""

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


def hidden_compression(batch):
    """The messages that the footer names follow a mark at which a reader of the stream would end."""
    data, places = compressed(batch), []
    stream = pa.BufferReader(data[8:])
    reader = pa.ipc.MessageReader.open_stream(stream)
    for _ in range(4):  # schema, two dictionaries, batch
        places.append(8 + stream.tell())
        reader.read_next_message()
    begin = len(data) - 10 - struct.unpack_from("<i", data, len(data) - 10)[0]
    footer = data[begin:]
    for place in places[1:]:
        assert footer.count(struct.pack("<q", place)) == 1
        footer = footer.replace(struct.pack("<q", place), struct.pack("<q", place + 8))
    return data[:8] + b"\xff\xff\xff\xff\0\0\0\0" + data[8:begin] + footer


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


def nulls(batch):
    return to_file(column(batch, "reward", pa.array([None] * batch.num_rows, pa.float64())))


def not_arrow(batch):
    return b"ARROW1\0\0" + b"\xff" * 2000


def other_policy(entry, folder):
    return replace(entry, weights_hash="0" * 64)


ATTACKS = {
    "symlink": (of_type(tarfile.SYMTYPE, linkname="/etc/passwd"), "no regular file"),
    "hard link": (of_type(tarfile.LNKTYPE, linkname="manifest.json"), "no regular file"),
    "device": (of_type(tarfile.CHRTYPE), "no regular file"),
    "sparse": (of_type(tarfile.GNUTYPE_SPARSE), "no regular file"),
    "extended header": (repeated_size, "no regular file"),
    "parent": (named("../evil"), "not in its manifest"),
    "absolute": (named("/tmp/evil"), "not in its manifest"),
    "declared parent": (declared("rollouts/../../evil"), "is no name"),
    "declared absolute": (declared("/etc/passwd"), "is no name"),
    "declared code": (declared("policy/modeling.py"), "could hold code"),
    "declared pickle": (declared("policy/pytorch_model.bin"), "could hold code"),
    "control characters": (declared("rollouts/\x1b[2J"), r"\\x1b"),
    "twice": (twice, "there twice"),
    "cut short": (cut_short, "ends in the middle|lacks"),
    "other bytes": (other_bytes, "does not match the checksum"),
    "longer": (longer, "its manifest says"),
    "a link in a directory": (link_inside, "is a link"),
    "a linked folder": (linked_folder, "is a link"),
    "a pipe": (pipe, "no regular file"),
    "gone": (gone, "lacks recipe.toml"),
    "huge": (huge, "GiB left"),
    "gzipped": (gzipped, "is no tar file"),
    "no manifest": (no_manifest, "unusable"),
    "a file of this machine": (recipe_with("data", train="/etc/passwd"), "not part of the packed stage"),
    "a judge": (recipe_with("reward", kind="judge"), "do not travel"),
    "other groups": (recipe_with("schedule", prompts_per_update=2), "not those of its recipe"),
    "a ledger that points outside": (rewritten_ledger(outside), "not in its ledger|not part of it"),
    "another policy": (rewritten_ledger(other_policy), "another policy|was sampled with"),
    "a compressed shard": (with_shard(compressed), "compressed"),
    "a batch behind the end": (with_shard(hidden_compression), "that its footer names"),
    "a version beyond 32 bits": (with_shard(far_version), "32 bits"),
    "a group chosen twice": (chosen(0, 0, *range(1, 8)), "not those of its recipe"),
    "groups chosen in disorder": (chosen(1, 0, *range(2, 8)), "not those of its recipe"),
    "fractions of groups": (chosen(*map(float, range(8))), "not those of its recipe"),
    "a deep ledger": (deep_ledger, "line 1 of .* is damaged"),
    "a device of the policy": (policy_that_names({"/dev/zero": "0" * 64}), "does not name the files beside it"),
    "a file of the policy that is not packed": (policy_that_names({"a.txt": "0" * 64}), "not part of the packed stage"),
    "files of the policy as a list": (policy_that_names(["a.txt"]), "does not name the files beside it"),
    "no vocabulary": (no_vocabulary, "vocab_size is 'many'"),
    "parts of a reward": (recipe_with("reward", parts=[1]), "is no recipe"),
    "a function of Python": (recipe_with("megatron", fp8_quantizer_factory="os.system"), "could name code"),
    "a directory": (recipe_with("megatron_optimizer", config_logger_dir="x"), "could name code"),
    "a path among modules": (recipe_with("megatron", recompute_modules=["mlp", "/etc/x"]), "could name code"),
    "a table for Megatron": (recipe_with("megatron", quant_recipe={"x": 1}), "could name code"),
    "a wide field": (recipe_with("data", prompt_template="{prompt:>9999999999}"), "by its name alone"),
    "an attribute": (recipe_with("data", prompt_template="{prompt.__class__}"), "by its name alone"),
    "a wide field of a suite": (recipe_with("eval", data={"prompt_template": "{prompt:>99}"}), "by its name alone"),
    "a token budget": (recipe_with("rollout", token_budget=2, oversample=2.0), "token_budget"),
    "offsets beyond the file": (with_shard(far_offsets), "no shard of megarl"),
    "an unknown token": (with_shard(unknown_token), "outside the vocabulary"),
    "groups in disorder": (with_shard(mixed_groups), "in order"),
    "nulls": (with_shard(nulls), "has nulls"),
    "no arrow": (with_shard(not_arrow), "no shard of megarl"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_stage_is_refused_in_one_line(attack, copy, tmp_path):
    make, message = ATTACKS[attack]
    source = make(copy, tmp_path)
    before = {path for path in tmp_path.rglob("*") if "copy" not in path.parts}
    with pytest.raises(UserError, match=message) as refused:
        unpack(source, tmp_path / "b", None, [])
    assert "\n" not in str(refused.value).replace("the recipe is wrong:\n", "")
    assert {path for path in tmp_path.rglob("*") if "copy" not in path.parts} == before


def test_what_a_strange_recipe_starts_or_asks_is_left_out(copy, tmp_path):
    tables = tomllib.loads((copy / "recipe.toml").read_text())
    tables["rollout"] |= {"sglang_python": "/tmp/evil", "vllm": {"hf_overrides": {}}, "sglang": {"x": 1}}
    tables["run"]["wandb"] = True
    tables["reward"]["parts"] = [{"kind": "python", "weight": 1.0, "path": "/tmp/evil.py:f"}]
    (copy / "recipe.toml").unlink()
    (copy / "recipe.toml").write_text(tomli_w.dumps(tables))
    agree(copy)
    unpack(copy, tmp_path / "b", None, [])
    recipe = RunDir.open(tmp_path / "b").recipe
    assert recipe.rollout.sglang_python is None and not recipe.rollout.vllm and not recipe.rollout.sglang
    assert not recipe.run.wandb and not recipe.reward.parts
    assert read_tables(tmp_path / "b/packed/recipe.toml")["run"]["wandb"] is True  # what was packed is kept


def test_set_changes_what_leaves_the_rollouts_as_they_are(packed, tmp_path):
    unpack(packed, tmp_path / "b", None, [], ["optimizer.lr=1e-3", "rollout.workers=2", "eval.samples=2"])
    recipe = RunDir.open(tmp_path / "b").recipe
    assert (recipe.optimizer.lr, recipe.rollout.workers, recipe.eval.samples) == (1e-3, 2, 2)
    others = ("rollout.temperature=0.5", "schedule.stages=3", "data.train=x", "model.path=/")
    for setting in (*others, "run.seed=7", "eval.prompts=8"):  # the last two give a group's number to another prompt
        with pytest.raises(UserError, match="were made under it"):
            unpack(packed, tmp_path / "c", None, [], [setting])
    with pytest.raises(UserError, match="score them again"):
        unpack(packed, tmp_path / "c", None, [], ["reward.require_stop=false"])


def test_what_is_left_out_of_a_recipe_can_be_given(copy, tmp_path):
    recipe_with("reward", kind="judge")(copy, tmp_path)
    recipe_with("megatron", fp8_quantizer_factory="os.system")(copy, tmp_path)
    given = ["reward.kind=exact", "megatron.fp8_quantizer_factory=mine.quantizer"]
    unpack(copy, tmp_path / "b", None, [], given)
    recipe = RunDir.open(tmp_path / "b").recipe
    assert (recipe.reward.kind, recipe.megatron["fp8_quantizer_factory"]) == ("exact", "mine.quantizer")


def test_a_policy_has_regular_files_beside_its_index(run, tmp_path):
    policy = shutil.copytree(run.stage(0).policy, tmp_path / "policy")
    (policy / "config.json").unlink()
    os.mkfifo(policy / "config.json")
    with pytest.raises(UserError, match=r"config\.json is no regular file"):
        check_policy(policy, "Restore it")
    shutil.copy(policy / "model.safetensors", tmp_path)
    (policy / INDEX_FILE).write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(UserError, match="no name of a file beside it"):
        weight_files(policy)


def test_a_damaged_run_is_not_packed(run, tmp_path):
    root = shutil.copytree(run.root, tmp_path / "run")
    path = next((root / "stages/000/rollouts").glob("*.arrow"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="does not match the checksum"):
        pack(root, 0, tmp_path / "stage.tar", LICENCE, weights=True, prompts=True)
    assert not list(tmp_path.glob("*.tar")) and not list(tmp_path.glob(".megarl-pack*"))


def test_sums_of_a_packed_stage_are_those_of_its_manifest(packed):
    assert sums(packed) == Source(packed).manifest
