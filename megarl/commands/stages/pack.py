"""``megarl stage pack``: one sealed stage with everything that its updates depend on, as a directory.

A manifest has sizes and checksums of its files. A packed stage may come from an untrusted source, so only plain paths
below a few folders are accepted, and nothing that would be decompressed or unpickled.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import tomli_w

from megarl.commands.scratch import open_staged
from megarl.data.tokenizer import TEMPLATES
from megarl.errors import UserError
from megarl.recipe.names import ENGINE_KEYS
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import decode, encode
from megarl.storage.checkpoints import FileSum, checkpoints
from megarl.storage.files import atomic_directory, check_new, disk_errors, file_sha256, make_directory
from megarl.storage.ledger import LEDGER, SEALED
from megarl.storage.policies import read_info, write_info
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir, Stage, sealed
from megarl.storage.run_dir.retention import require_policy

MANIFEST, CARD, RECIPE = "manifest.json", "README.md", "recipe.toml"
POLICY, FIRST_POLICY, ROLLOUTS, CHECKPOINTS, FILES = "policy", "first_policy", "rollouts", "checkpoints", "files"
FORMAT = 1
MAX_NAME = 100  # characters
# files that could be executed or unpickled when a model is loaded; megarl needs none of them
UNWANTED = (".py", ".pyc", ".so", ".sh", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack", ".zip")
_PART = r"\.?[A-Za-z0-9_][A-Za-z0-9_.+=@-]*"
_NAME = re.compile(
    rf"{RECIPE}|({POLICY}|{FIRST_POLICY})/({TEMPLATES}/)?{_PART}|({ROLLOUTS}|{FILES})/{_PART}|"
    rf"{CHECKPOINTS}/update_\d{{6,}}/{_PART}"
)
LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")  # an identifier of the Hub or of SPDX
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


@dataclass(frozen=True)
class Manifest:
    """The contents of a packed stage."""

    stage: int  # its number in the run that it comes from
    model: str  # name of the run's base model, only for people
    weights_hash: str  # of the policy that generated the rollouts
    licence: str
    prompts: dict[str, str]  # {name below files/: sha256} of the recipe's prompt files and templates, packed or not
    files: dict[str, FileSum]  # by name, without the manifest itself and the card, which only people read

    def dump(self) -> bytes:
        return encode({"format": FORMAT} | asdict(self), indent=1)

    @classmethod
    def parse(cls, data: bytes, where: Path) -> Self:
        """Decode and check a manifest; ``where`` is named in the `UserError` for one that is not valid."""
        try:
            fields = decode(data)
            if fields.pop("format") != FORMAT:
                raise ValueError("it was packed by a version of megarl with another format")
            files = {str(name): FileSum(**sums) for name, sums in fields.pop("files").items()}
            manifest = cls(**fields, files=files)
            manifest._check()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{where}: the manifest of this packed stage is unusable: {error}") from error
        return manifest

    def _check(self) -> None:
        texts = (self.model, self.weights_hash, self.licence, *self.prompts.values())
        if type(self.stage) is not int or self.stage < 0 or not all(isinstance(text, str) for text in texts):
            raise ValueError("a field has the wrong type")
        for name, sums in self.files.items():
            check_name(name)
            sizes = type(sums.bytes) is int and sums.bytes >= 0
            if not sizes or not isinstance(sums.sha256, str) or not re.fullmatch("[0-9a-f]{64}", sums.sha256):
                raise ValueError(f"{name} has no size and checksum")
        for name in self.prompts:
            check_name(f"{FILES}/{name}")
        needed = {RECIPE, f"{ROLLOUTS}/SEALED", f"{ROLLOUTS}/ledger.jsonl", f"{POLICY}/megarl.json"}
        if absent := needed - self.files.keys():
            raise ValueError(f"it lacks {min(absent)}")

    def below(self, folder: str) -> dict[str, FileSum]:
        """The files of ``folder``, by their names inside it."""
        return {
            name.removeprefix(f"{folder}/"): sums for name, sums in self.files.items() if name.startswith(f"{folder}/")
        }

    @property
    def has_weights(self) -> bool:
        return any(name.endswith(".safetensors") for name in self.below(POLICY))

    @property
    def bytes(self) -> int:
        return sum(sums.bytes for sums in self.files.values())


def check_name(name: str) -> None:
    """ValueError for a name that is not allowed in a packed stage."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ValueError(f"{name[:200]!a} is not allowed as the name of a file in a packed stage")
    # the pickled parts of checkpoints are allowed, since `megarl.actor.checkpoint` reads only plain data from them
    if name.endswith(UNWANTED) and not name.startswith(f"{CHECKPOINTS}/"):
        raise ValueError(f"{name!a} could contain code, which is not allowed in a packed stage")


def describe(manifest: Manifest) -> dict[str, Any]:
    """The main facts about a packed stage, for ``--json``."""
    counts = {"weights": manifest.has_weights, "files": len(manifest.files), "bytes": manifest.bytes}
    return asdict(manifest) | counts


def pack(run_dir: Path, number: int, output: Path, licence: str, weights: bool, prompts: bool) -> Manifest:
    """Pack stage ``number`` of a run as the directory ``output``.

    weights: include the policy's weights. Stages after the first always include them, and the last checkpoint of the
    stage before, since these exist nowhere else.
    prompts: include the recipe's prompt files and templates; their checksums are always included.
    Files are hard links if the file system has them. `UserError` for a stage that is not sealed, or is damaged.
    """
    stage = open_staged(run_dir, number)
    if not LICENCE.fullmatch(licence):
        raise UserError(f"--license {licence!r}: expected an identifier, such as apache-2.0, cc-by-4.0 or other")
    check_new(output)
    if not stage.is_sealed():
        raise UserError(f"{stage.rollouts} is not sealed: only a complete stage can be packed")
    _check_self_contained(stage)
    require_policy(stage)
    stage.run.check_prompts()
    output = output.resolve()
    make_directory(output.parent)
    with disk_errors(output), atomic_directory(output) as folder:
        return _pack(stage, folder, licence, weights, prompts)


def _check_self_contained(stage: Stage) -> None:
    """`UserError` if the updates of the stage depend on something that a packed stage cannot contain."""
    if stage.run.recipe.rollout.token_budget is not None:
        raise UserError(
            "with rollout.token_budget a stage trains groups that earlier stages began: it cannot be packed alone"
        )
    if stage.number == 0 and stage.run.start():
        raise UserError(
            f"{stage.run.root} starts from the optimizer of another run (--continue-from), which cannot be packed: "
            "pack a later stage"
        )


def _pack(stage: Stage, folder: Path, licence: str, weights: bool, prompts: bool) -> Manifest:
    run, store = stage.run, RolloutStore(stage.rollouts)
    for directory in [stage.rollouts, stage.policy, *([run.base, last_checkpoint(stage)] if stage.number else [])]:
        sealed.check(directory, "Restore it from a copy before it is packed")
    _copy_policy(stage.policy, folder / POLICY, weights or stage.number > 0)
    if stage.number:
        _copy_policy(run.base, folder / FIRST_POLICY, True)
        path = last_checkpoint(stage)
        _link_all([file for file in path.iterdir() if file.is_file()], folder / CHECKPOINTS / path.name)
    _link_all(
        [stage.rollouts / name for name in (SEALED, LEDGER, *(e.shard for e in store.entries))], folder / ROLLOUTS
    )
    files = {_packed_name(name): Path(name) for name in _data_files(run)}
    if prompts:
        for name, path in files.items():
            _link(path, folder / FILES / name)
    (folder / RECIPE).write_text(tomli_w.dumps(_portable(run.recipe)))
    manifest = Manifest(
        stage=stage.number,
        model=re.sub(r"[^A-Za-z0-9_.+-]", "_", run.recipe.model.path.name),
        weights_hash=read_info(stage.policy).weights_hash,
        licence=licence,
        prompts={name: file_sha256(path) for name, path in files.items()},
        files=dict(sums_below(folder)),
    )
    (folder / CARD).write_text(_card(manifest, store, run.recipe, re.sub(r"[^A-Za-z0-9_.-]", "_", run.root.name)))
    (folder / MANIFEST).write_bytes(manifest.dump())
    return manifest


def _card(manifest: Manifest, store: RolloutStore, recipe: Recipe, name: str) -> str:
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


def _copy_policy(policy: Path, target: Path, weights: bool) -> None:
    """Copy a policy without hidden files and without files that could be executed or unpickled, such as *.py."""
    info = read_info(policy)
    kept = {name: sum for name, sum in info.files.items() if not name.endswith(UNWANTED) and not name.startswith(".")}
    weight = [path.name for path in policy.glob("*.safetensors")] if weights else []
    for name in (*kept, *weight):
        _link(policy / name, target / name)
    write_info(target, replace(info, files={}))


def last_checkpoint(stage: Stage) -> Path:
    """The checkpoint from which the optimizer of the stage starts; `UserError` if it was removed."""
    saved = dict(checkpoints(stage.previous.checkpoints))
    path = saved.get(stage.run.recipe.schedule.updates_per_stage)
    if path is None:
        raise UserError(
            f"{stage.previous.checkpoints} lacks the last checkpoint of stage {stage.number - 1}, from which the "
            "optimizer of this stage starts: [actor] keep_stages removed it, or the run is a branch"
        )
    return path


def _link_all(files: list[Path], folder: Path) -> None:
    for file in files:
        _link(file, folder / file.name)


def _link(file: Path, target: Path) -> None:
    """Hard-link a sealed file, which never changes; copy it if the file system has no hard links."""
    make_directory(target.parent)
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copyfile(file, target)


def sums_below(folder: Path) -> Iterator[tuple[str, FileSum]]:
    """(name, checksum) of every file that the manifest of the packed directory ``folder`` names."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name in (MANIFEST, CARD):
            continue
        try:
            check_name(name)
        except ValueError as error:
            raise UserError(f"the stage cannot be packed: {error}") from error
        yield name, FileSum.of(path)


def _data_files(run: RunDir) -> list[str]:
    return sorted({*run.recipe.prompt_files(), *run.recipe.template_files()})


def _packed_name(name: str) -> str:
    """A unique name below files/ for a prompt file or template."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(name).name)[-60:].lstrip(".")
    return f"{file_sha256(Path(name))[:12]}_{safe}"


def _portable(recipe: Recipe) -> dict[str, Any]:
    """The recipe without paths, programs and servers of this machine."""
    names = {name: f"{FILES}/{_packed_name(name)}" for name in (*recipe.prompt_files(), *recipe.template_files())}
    tables = without_machine(recipe.model_dump(mode="json", exclude_none=True), POLICY, names)
    objective = tables["objective"]  # of code, only the name of its file is told, so that unpacking asks for it
    objective |= {key: Path(objective[key]).name for key in ("path", "advantage") if key in objective}
    return tables


def without_machine(tables: dict[str, Any], model: str, names: dict[str, str]) -> dict[str, Any]:
    """A copy of a recipe's tables without engine options, programs, servers, and code of rewards.

    model: the path of the model. names: what the paths of prompt files and templates become.
    """
    reward = {key: value for key, value in tables.get("reward", {}).items() if key not in ("service", "path")}
    reward["parts"] = [part for part in reward.get("parts", []) if part.get("kind") != "python"]
    rollout = {key: value for key, value in tables.get("rollout", {}).items() if key not in ENGINE_KEYS}
    prompts = {name: _replaced(tables.get(name, {}), names) for name in ("data", "eval")}
    kept = {name: table for name, table in tables.items() if name != "stages"}
    return kept | {"model": {"path": model}, "rollout": rollout, "reward": reward} | prompts


def _replaced(tree: Any, names: dict[str, str]) -> Any:
    """A copy of a table, at any depth, in which every string that is a key of ``names`` is replaced by its value."""
    if isinstance(tree, dict):
        return {key: _replaced(value, names) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_replaced(value, names) for value in tree]
    return names.get(tree, tree) if isinstance(tree, str) else tree
