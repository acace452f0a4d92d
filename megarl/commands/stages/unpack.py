"""``megarl stage unpack``: makes a run directory of a packed stage, in which it can be read and optimized.

``packed/`` has the policy, the rollouts, which the store writes anew, and the prompt files; ``stages/`` links to them.
A pack may come from a stranger: its files are those of its manifest, and settings of its recipe that name a file
outside it, start a program or ask a server are removed or refused; whoever unpacks it gives their own with ``--set``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.commands.one_phase import NEED_NO_ANSWER
from megarl.commands.stages.pack import CARD, FILES, MANIFEST, POLICY, ROLLOUTS, Manifest, sums_below, without_machine
from megarl.data.prompts import banned_prompts
from megarl.errors import UserError
from megarl.foreign import quoted
from megarl.models.hf_config import read_hf_config
from megarl.own_file import is_own
from megarl.recipe.layout import TRAINING_TABLES
from megarl.recipe.load import Overrides, apply_overrides, parse_override, parse_recipe
from megarl.recipe.rollout_table import ENGINE_KEYS
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import write_checked
from megarl.storage.checkpoints import Damaged, check_files
from megarl.storage.files import atomic_directory, check_new, file_sha256, make_directory
from megarl.storage.policies import PolicyInfo, check_weight_files, copy_auxiliary, copy_weights, write_info
from megarl.storage.rollouts import RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import RunDir, Stage
from megarl.storage.run_dir.recipes import EVALUATION
from megarl.storage.shards import read_parquet
from megarl.views.audit.rollouts import check_shard

PACKED = "packed"  # directory in the run directory
_ENGINE = ("engine", "workers", "tensor_parallel", "memory_fraction", "float32_head", "groups_per_chunk", *ENGINE_KEYS)
# beginnings of the settings that --set may change, since the stored rollouts do not depend on them
_OPEN = (*TRAINING_TABLES, "metrics.", "run.", *(f"eval.{x}" for x in EVALUATION), *(f"rollout.{x}" for x in _ENGINE))
_NO_NUMBER = (str, list, dict)
_PASSED_THROUGH = ("megatron", "megatron_ddp", "megatron_optimizer")  # tables of which Megatron-Core imports some texts


def unpack(source: Path, target: Path, model: Path | None = None, overrides: Overrides = ()) -> Manifest:
    """Make the run directory ``target``, completely or not at all.

    model: the base model, for a stage that was packed without weights; its weights must be the same to the byte.
    `UserError`, of one line, for anything that contradicts the manifest, the recipe or the rules of a run directory.
    """
    target = target.resolve()
    check_new(target)
    manifest = Manifest.read(source)
    _check_files(source, manifest)
    with atomic_directory(target) as temporary:
        folder = temporary / PACKED
        make_directory(folder / FILES)
        for name in manifest.prompts:
            shutil.copyfile(source / name, folder / name)
        recipe = _recipe(manifest, target, overrides)
        run = RunDir.create(temporary, recipe)
        sums = {str(target / PACKED / name): sha256 for name, sha256 in manifest.prompts.items()}
        sums |= {name: file_sha256(Path(name)) for name in recipe.own_files() if Path(name).is_file()}
        write_checked(run.prompts, {"files": sums})
        stage = run.stage(0)
        _add_policy(source, manifest, folder / POLICY, model)
        _link(folder / POLICY, stage.policy)
        _add_rollouts(source, manifest, folder / ROLLOUTS, stage)
        _check_heldout(stage, _recipe(manifest, temporary, overrides))
        replace(manifest, files=sums_below(folder)).write(folder)
        stage.log_event("unpacked", source=source.name, weights_hash=manifest.weights_hash)
    return manifest


def _check_files(source: Path, manifest: Manifest) -> None:
    """`UserError` unless the directory consists of exactly the files in its manifest; reads all of them.

    Hidden files beside the manifest, such as those of ``hf download``, are ignored.
    """
    found = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_symlink() or not path.is_dir()}
    if extra := sorted(name for name in found - {*manifest.files, MANIFEST, CARD} if not name.startswith(".")):
        raise UserError(f"{source}: {extra[0]!a} is not in its manifest")
    for name in manifest.files:
        if not (source / name).is_file() or (source / name).resolve() != source.resolve() / name:
            raise UserError(f"{source}: {name} is missing, or is a link or no regular file")
    try:
        check_files(source, manifest.files)
    except Damaged as error:
        raise UserError(f"{source} is damaged: {error}") from error


def _add_policy(source: Path, manifest: Manifest, policy: Path, model: Path | None) -> None:
    make_directory(policy)
    copy_auxiliary(source / POLICY, policy)
    weights = source / POLICY if manifest.has_weights else model
    if weights is not None:
        check_weight_files(weights)
        if copy_weights(weights, policy) != manifest.weights_hash:
            raise UserError(
                f"{weights} has other weights than the policy of the stage, {manifest.model!a:.200}: its weight files "
                "must have the same names and bytes"
            )
    write_info(policy, PolicyInfo(0, manifest.weights_hash))


def _link(path: Path, link: Path) -> None:
    """A relative link, since the run directory will be renamed."""
    make_directory(link.parent)
    os.symlink(os.path.relpath(path, link.parent), link)


def _add_rollouts(source: Path, manifest: Manifest, rollouts: Path, stage: Stage) -> None:
    """Write and seal the packed responses with the store's writer, and check that they are those of such a stage."""
    vocabulary, needed = read_hf_config(stage.policy)["vocab_size"], stage.run.recipe.groups_per_stage
    with RolloutWriter(rollouts, weights_hash=manifest.weights_hash, logprob_mode=manifest.logprob_mode) as writer:
        for name in sorted(name for name in manifest.files if name.startswith(f"{ROLLOUTS}/")):
            writer.append(read_parquet(source / name, manifest.weights_hash, manifest.logprob_mode, vocabulary))
    groups = RolloutStore(rollouts).group_ids
    if len(groups) != needed:
        raise UserError(f"{source} has {len(groups)} groups, but its recipe trains {needed} in a stage")
    chosen = None if groups == list(stage.groups) else groups
    seal(rollouts, stage.groups, chosen, external=manifest.external is True)
    _link(rollouts, stage.rollouts)
    for entry in RolloutStore(rollouts).entries:
        for problem in check_shard(stage, stage.rollouts, entry):
            raise UserError(problem)


def _recipe(manifest: Manifest, root: Path, overrides: Overrides) -> Recipe:
    """The packed recipe with ``overrides``, and with the paths of the run directory ``root``."""
    names = {name: str(root / PACKED / name) for name in manifest.prompts}
    given = {name for name, _ in map(parse_override, overrides)}
    try:
        tables = without_machine(manifest.recipe, str(root / PACKED / POLICY), names)
        foreign = [name for name in _foreign(tables) if name not in given]
        lacks_reward = tables["reward"].get("kind") in NEED_NO_ANSWER  # its code or server is not packed
    except (AttributeError, TypeError) as error:  # of what is no table or list; `parse_recipe` checks all the rest
        raise UserError(f"the manifest of the packed stage has no recipe: {error}") from error
    for name in sorted(given):
        if name == "run.seed" or not name.startswith((*_OPEN, "reward.") if lacks_reward else _OPEN):
            raise UserError(
                f"--set {name}: the rollouts depend on it; --set may only change {', '.join(_OPEN)} (not run.seed). To "
                "score them again, unpack first: `megarl optimize RUN --stage 0 --output DIR --set reward.KEY=VALUE`"
            )
    if foreign and not (foreign == ["objective.name"] and "objective.path" in given):
        raise UserError(f"the packed recipe has {foreign[0]!a:.80} of its author, maybe code: give yours with --set")
    apply_overrides(tables, overrides)
    try:
        recipe = parse_recipe(tables)
    except UserError as error:
        hint = "own code, servers and programs are not packed: give yours with --set TABLE.KEY=VALUE"
        raise UserError(f"{error} ({hint})") from error
    for path in (*recipe.prompt_files(), *recipe.template_files()):
        if path not in names.values():
            raise UserError(f"the packed recipe names the file {path!a:.200}, which is not part of the packed stage")
    return recipe


def _foreign(tables: dict[str, Any]) -> Iterator[str]:
    """The settings that could name code or a file of whoever packed the stage."""
    for table in _PASSED_THROUGH:
        yield from (f"{table}.{key}" for key, value in tables.get(table, {}).items() if isinstance(value, _NO_NUMBER))
    yield from (f"objective.{key}" for key in ("advantage", "name") if is_own(str(tables["objective"].get(key))))


def _check_heldout(stage: Stage, recipe: Recipe) -> None:
    """`UserError` if prompts of the rollouts are held out for evaluation. recipe: its files are where they are now."""
    banned, store = banned_prompts(recipe, stage.policy), RolloutStore(stage.rollouts)
    found = [group.group_id for group in store.read(store.group_ids) if tuple(group.prompt_tokens.tolist()) in banned]
    if found:
        raise UserError(
            f"{len(found)} of {len(store.group_ids)} groups have prompts that are held out for evaluation, the first "
            f"is group {found[0]}: unpack the stage without evaluation, --set eval.every=0 --set eval.every_updates=0"
        )


def describe_unpacked(manifest: Manifest, target: Path) -> str:
    """The text to print after unpacking, with the next command."""
    after = "it has no weights, so it can only be read; to optimize it, unpack it with --model PATH"
    if any((target / PACKED / POLICY).glob("*.safetensors")):
        branch = f"--stage 0 --output {quoted(f'{target}-b')} --set objective.name=grpo"
        after = f"next    megarl optimize {quoted(target)} {branch}"
    return f"wrote {target}, licence {manifest.licence!a:.60}\n{after}"
