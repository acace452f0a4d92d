"""``megarl stage pack``: one sealed stage of a run, with all that its updates depend on, in one place."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.scratch import open_stage
from megarl.stages.card import write_card
from megarl.stages.packed import (
    CARD,
    CHECKPOINTS,
    FILES,
    FIRST_POLICY,
    MANIFEST,
    POLICY,
    RECIPE,
    ROLLOUTS,
    UNWANTED,
    Manifest,
    check_name,
    write_tar,
)
from megarl.stages.target import check_new, new_directory
from megarl.storage.checkpoints import FileSum, checkpoints
from megarl.storage.files import disk_errors, file_sha256, make_directory
from megarl.storage.ledger import LEDGER, SEALED
from megarl.storage.origin import start_of
from megarl.storage.policies import check_policy, read_info, write_info
from megarl.storage.retention import require_policy
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir, Stage

LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")  # as the Hub and SPDX write one


def pack(run_dir: Path, number: int, output: Path, licence: str, weights: bool, prompts: bool) -> Manifest:
    """Stage ``number`` of a run as the directory ``output``, or as a tar file where its name ends in .tar.

    weights: of the policy too. A stage after the first has them in any case, and the last checkpoint of the one before,
    since they are nowhere else. prompts: the recipe's prompt files and templates too; their checksums are there anyway.
    Files are linked where the file system can. `UserError` for a stage that is not sealed, or damaged.
    """
    stage = open_stage(run_dir, number)
    if not LICENCE.fullmatch(licence):
        raise UserError(f"--license {licence!r}: expected an identifier, such as apache-2.0, cc-by-4.0 or other")
    check_new(output)
    if not stage.is_sealed():
        raise UserError(f"{stage.rollouts} is not sealed: a stage travels once it is complete")
    _check_travels(stage)
    require_policy(stage)
    stage.run.check_prompts()
    output = output.resolve()
    make_directory(output.parent)
    with disk_errors(output):
        if output.suffix != ".tar":
            with new_directory(output) as folder:
                return _pack(stage, folder, licence, weights, prompts)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".megarl-pack-") as scratch:
            manifest = _pack(stage, Path(scratch) / "stage", licence, weights, prompts)
            write_tar(Path(scratch) / "stage", manifest, Path(scratch) / "stage.tar")
            os.replace(Path(scratch) / "stage.tar", output)
            return manifest


def _check_travels(stage: Stage) -> None:
    """`UserError` where the updates of the stage depend on what has no place in a packed stage."""
    if stage.run.recipe.rollout.token_budget is not None:
        raise UserError(
            "with rollout.token_budget a stage trains groups that others began: it cannot be packed without them"
        )
    if stage.number == 0 and start_of(stage.run):
        raise UserError(
            f"{stage.run.root} begins with the optimizer of another run (--continue-from), which a packed stage has no "
            "place for: pack a later stage"
        )


def _pack(stage: Stage, folder: Path, licence: str, weights: bool, prompts: bool) -> Manifest:
    run, store = stage.run, RolloutStore(stage.rollouts)
    for entry in store.entries:
        store.verify(entry)
    _copy_policy(stage.policy, folder / POLICY, weights or stage.number > 0)
    if stage.number:
        _copy_policy(run.base, folder / FIRST_POLICY, True)
        _copy_checkpoint(stage, folder)
    _link_all(
        [stage.rollouts / name for name in (SEALED, LEDGER, *(e.shard for e in store.entries))], folder / ROLLOUTS
    )
    files = {_place(name): Path(name) for name in _data_files(run)}
    if prompts:
        for name, path in files.items():
            _link(path, folder / FILES / name)
    (folder / RECIPE).write_text(tomli_w.dumps(_travelling(run.recipe)))
    manifest = Manifest(
        stage=stage.number,
        model=re.sub(r"[^A-Za-z0-9_.+-]", "_", run.recipe.model.path.name),
        weights_hash=read_info(stage.policy).weights_hash,
        licence=licence,
        prompts={name: file_sha256(path) for name, path in files.items()},
        files=dict(_sums(folder)),
    )
    (folder / CARD).write_text(write_card(manifest, store, run.recipe, re.sub(r"[^A-Za-z0-9_.-]", "_", run.root.name)))
    (folder / MANIFEST).write_bytes(manifest.dump())
    return manifest


def _copy_policy(policy: Path, target: Path, weights: bool) -> None:
    """Without what no model of megarl needs, and what others could run or unpickle."""
    check_policy(policy, "Restore it from a copy before it is packed")
    info = read_info(policy)
    kept = {name: sum for name, sum in info.files.items() if not name.endswith(UNWANTED) and not name.startswith(".")}
    weight = [path.name for path in policy.glob("*.safetensors")] if weights else []
    _link_all([policy / name for name in (*kept, *weight)], target)
    write_info(target, replace(info, files={}))


def _copy_checkpoint(stage: Stage, folder: Path) -> None:
    saved = dict(checkpoints(stage.previous.checkpoints))
    path = saved.get(stage.run.recipe.schedule.updates_per_stage)
    if path is None:
        raise UserError(
            f"{stage.previous.checkpoints} lacks the last checkpoint of stage {stage.number - 1}, with which the "
            "optimizer of this stage begins: [actor] keep_stages let go of it, or the run is a branch"
        )
    _link_all([file for file in path.iterdir() if file.is_file()], folder / CHECKPOINTS / path.name)


def _link_all(files: list[Path], folder: Path) -> None:
    for file in files:
        _link(file, folder / file.name)


def _link(file: Path, target: Path) -> None:
    """A hard link where possible: sealed files never change."""
    make_directory(target.parent)
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copyfile(file, target)


def _sums(folder: Path) -> Iterator[tuple[str, FileSum]]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        try:
            check_name(name)
        except ValueError as error:
            raise UserError(f"it cannot be packed: {error}") from error
        yield name, FileSum.of(path)


def _data_files(run: RunDir) -> list[str]:
    return sorted({*run.recipe.prompt_files(), *run.recipe.template_files()})


def _place(name: str) -> str:
    """Of a prompt file or template below files/: not two files of one name."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(name).name)[-60:].lstrip(".")
    return f"{file_sha256(Path(name))[:12]}_{safe}"


def _travelling(recipe: Recipe) -> dict[str, Any]:
    """The recipe without the paths and addresses of this machine."""
    tables = recipe.model_dump(mode="json", exclude_none=True)
    names = {name: f"{FILES}/{_place(name)}" for name in (*recipe.prompt_files(), *recipe.template_files())}
    tables["model"] = {"path": POLICY}
    for table in ("data", "eval"):
        tables[table] = replaced(tables[table], names)
    tables["rollout"] = without_machine(tables["rollout"])
    tables.pop("stages", None)
    tables["reward"] = without_others(tables["reward"])
    return tables


def replaced(tree: Any, names: dict[str, str]) -> Any:
    """A table with other texts in place of those that ``names`` has."""
    if isinstance(tree, dict):
        return {key: replaced(value, names) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replaced(value, names) for value in tree]
    return names.get(tree, tree) if isinstance(tree, str) else tree


def without_machine(rollout: dict[str, Any]) -> dict[str, Any]:
    """``[rollout]`` without what starts programs, or says something of engines on one machine."""
    return {key: value for key, value in rollout.items() if key not in ("sglang_python", "vllm", "sglang")}


def without_others(reward: dict[str, Any]) -> dict[str, Any]:
    """``[reward]`` without code that would be run and servers that would be asked, with whatever key."""
    parts = [part for part in reward.get("parts", []) if part.get("kind") != "python"]
    return {key: value for key, value in reward.items() if key not in ("service", "path")} | {"parts": parts}
