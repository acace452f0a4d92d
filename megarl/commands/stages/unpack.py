"""``megarl stage unpack``: makes a run directory of a packed stage, in which it can be read and optimized.

The run is like a branch: ``packed/`` has the verified files, and ``stages/`` links to them; the rollouts among them are
written anew by the store's writer. The packed stage may come from an untrusted source: every size is known before
anything is written, and every file is a regular file with its checksum. Settings of its recipe that name a file outside
it, start a program or ask a server are removed or refused; whoever unpacks it gives their own with ``--set``.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import stat
import string
import tempfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import psutil
import pyarrow as pa

from megarl.commands.stages.ingest import vocabulary_size
from megarl.commands.stages.pack import (
    CHECKPOINTS,
    FILES,
    FIRST_POLICY,
    MANIFEST,
    POLICY,
    RECIPE,
    ROLLOUTS,
    Manifest,
    sums_below,
    without_machine,
)
from megarl.data.prompts import banned_prompts
from megarl.errors import UserError
from megarl.foreign import quoted
from megarl.recipe.layout import TRAINING_TABLES
from megarl.recipe.load import Overrides, apply_overrides, parse_override, parse_recipe, read_tables
from megarl.recipe.names import ADVANTAGES, ENGINE_KEYS
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import write_checked
from megarl.storage.checkpoints import FileSum
from megarl.storage.files import atomic_directory, check_new, disk_errors, file_sha256, make_directory
from megarl.storage.ledger import LEDGER, SEALED, LedgerEntry, check_seal
from megarl.storage.metrics.trackers import NONE as NO_TRACKERS
from megarl.storage.policies import check_weight_files, copy_weights, is_mxfp4, read_info, weight_files
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import RunDir, Stage, sealed
from megarl.storage.run_dir.recipes import EVALUATION
from megarl.storage.shards import FIRST_VERSION, Shard, to_batch, validate
from megarl.views.audit.rollouts import check_shard

_MEMORY = 1 << 28  # bytes for the rows of a small shard
MAX_MANIFEST = 16 << 20  # bytes
PACKED = "packed"  # directory in the run directory, with the files of the packed stage
# settings that --set may change, since the stored rollouts do not depend on them
_OPEN = (*TRAINING_TABLES, "reward.", "metrics.", "run.")
_ENGINE = ("engine", "workers", "tensor_parallel", "memory_fraction", "float32_head", "groups_per_chunk")
_ENGINE_TABLES = tuple(f"rollout.{key}" if key.endswith("_python") else f"rollout.{key}." for key in ENGINE_KEYS)
_LEFT_OUT = ("judge", "http", "python")  # kinds of rewards whose code or server is not packed
# endings of Megatron-Core's settings whose values it imports, opens or calls; values that name no module or file
_NAMES_CODE = ("_factory", "_path", "_dir", "_cfg", "_func")
_PLAIN_TEXT = re.compile(r"[^./\\]*")
_PLAIN_FIELD = re.compile(r"\w*(\[\w+\])*")  # a field of a prompt template, without access to attributes


def unpack(
    source: Path, target: Path, model: Path | None, prompts: Sequence[Path], overrides: Overrides = ()
) -> Manifest:
    """Make the run directory ``target``, completely or not at all.

    model: the base model, for a stage that was packed without weights; its weights (MXFP4 converted to bfloat16) must
    be the same to the byte.
    prompts: the prompt files, if they were not packed; they are recognised by their checksums.
    `UserError`, of one line, for anything that contradicts the manifest, the recipe or the rules of a run directory.
    """
    target = target.resolve()
    check_new(target)
    with atomic_directory(target) as temporary:
        folder = temporary / PACKED
        manifest = _copy(source, folder)
        _add_prompts(manifest, folder, prompts)
        _add_weights(manifest, folder, model)
        recipe = _recipe(manifest, folder, target / PACKED, overrides)
        run = RunDir.create(temporary, recipe)
        sums = {str(target / PACKED / FILES / name): manifest.prompts[name] for name in manifest.prompts}
        write_checked(run.prompts, {"files": sums | {name: file_sha256(Path(name)) for name in recipe.own_files()}})
        if not 0 <= manifest.stage < recipe.schedule.stages:
            raise UserError(
                f"{source} is stage {manifest.stage}, but its recipe has only {recipe.schedule.stages} stages"
            )
        stage = run.stage(manifest.stage)
        _link_stage(stage, manifest)
        _check(stage, manifest)
        _check_heldout(stage, _recipe(manifest, folder, folder, overrides))
        # with prompts and weights from elsewhere and the rollouts as they were written anew
        (folder / MANIFEST).write_bytes(replace(manifest, files=dict(sums_below(folder))).dump())
        stage.log_event("unpacked", source=source.name, weights_hash=manifest.weights_hash)
    return manifest


def _copy(source: Path, target: Path) -> Manifest:
    """Copy a packed stage; `UserError` if a file is missing or differs from what the manifest says."""
    with _opened(source, MANIFEST) as file:
        manifest = Manifest.parse(file.read(MAX_MANIFEST), source)
    parent = next(folder for folder in target.parents if folder.exists())
    if manifest.bytes > (free := shutil.disk_usage(parent).free):
        sizes = f"{manifest.bytes / 2**30:.1f} GiB, but {parent} has {free / 2**30:.1f} GiB left"
        raise UserError(f"{source} needs {sizes}")
    with disk_errors(target):
        for name, expected in manifest.files.items():
            make_directory((target / name).parent)
            with _opened(source, name) as file, open(target / name, "xb") as copy:
                if (size := os.fstat(file.fileno()).st_size) != expected.bytes:
                    raise UserError(f"{source}: {name} has {size} bytes, but its manifest says {expected.bytes}")
                shutil.copyfileobj(file, copy)
            if FileSum.of(target / name) != expected:
                raise UserError(f"{source}: {name} does not match the checksum in its manifest")
    return manifest


@contextlib.contextmanager
def _opened(source: Path, name: str) -> Iterator[IO[bytes]]:
    path = source / name
    if not path.resolve().is_relative_to(source.resolve()) or path.is_symlink():
        raise UserError(f"{path} is a link, which is not allowed in a packed stage")
    if not path.exists():
        raise UserError(f"{source} is not the directory of a packed stage, or not all of it: it lacks {name}")
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path} is not a regular file")
        yield file


def _add_prompts(manifest: Manifest, folder: Path, given: Sequence[Path]) -> None:
    sums = {file_sha256(path): path for path in given}
    for name, expected in manifest.prompts.items():
        path = folder / FILES / name
        if not path.exists():
            if expected not in sums:
                raise UserError(
                    f"{name} was not packed: give that file with --prompts FILE; its sha256 is {expected[:200]!a}"
                )
            make_directory(path.parent)
            shutil.copyfile(sums[expected], path)
        if file_sha256(path) != expected:
            raise UserError(f"{name} does not match the checksum in its manifest")


def _add_weights(manifest: Manifest, folder: Path, model: Path | None) -> None:
    if manifest.has_weights or model is None:
        return
    check_weight_files(model)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".weights-") as scratch:
        found = copy_weights(model, Path(scratch))
        if found != manifest.weights_hash:
            raise UserError(
                f"--model {model} has other weights (hash {found[:12]}) than the policy of the stage, "
                f"{manifest.model[:200]!a} (hash {manifest.weights_hash[:12]!a}); its weight files must have the same "
                "names and bytes (MXFP4 weights after their conversion to bfloat16)"
            )
        for file in weight_files(Path(scratch)):
            os.rename(file, folder / POLICY / file.name)  # the index was packed, and stays


def _recipe(manifest: Manifest, folder: Path, final: Path, overrides: Overrides) -> Recipe:
    """The packed recipe with ``overrides``, and with paths of this machine. ``folder`` will be renamed to ``final``."""
    tables = read_tables(folder / RECIPE)
    given = {name for name, _ in map(parse_override, overrides)}
    names = {f"{FILES}/{name}": str(final / FILES / name) for name in manifest.prompts}
    try:
        _check_overrides(overrides, tables.get("reward", {}).get("kind") in _LEFT_OUT)
        _check_settings(tables, given)
        if "objective.path" not in given:
            tables.get("objective", {}).pop("path", None)  # objective.name is given instead
        tables = without_machine(tables, str(final / (FIRST_POLICY if manifest.stage else POLICY)), names)
        tables["run"] = tables.get("run", {}) | NO_TRACKERS
    except (AttributeError, TypeError) as error:  # of what is no table or list; `parse_recipe` checks all the rest
        raise UserError(f"{folder / RECIPE} is not a recipe: {error}") from error
    apply_overrides(tables, overrides)
    try:
        recipe = parse_recipe(tables)
    except UserError as error:
        foreign = tables["reward"].get("kind") in _LEFT_OUT
        hint = " (code and servers of rewards are not packed: give your own with --set reward.KEY=VALUE)"
        raise UserError(f"{error}{hint if foreign else ''}") from error
    if recipe.rollout.token_budget is not None:
        raise UserError("the packed recipe has rollout.token_budget: its stages train groups that earlier ones began")
    for path in (*recipe.prompt_files(), *recipe.template_files()):
        if path not in names.values():
            raise UserError(f"the packed recipe names the file {path[:200]!a}, which is not part of the packed stage")
    return recipe


def _check_settings(tables: dict[str, Any], given: Container[str]) -> None:
    """`UserError` for settings with which an untrusted recipe could import code, open files or fill the memory.

    given: the names of the settings that --set gives, which are trusted.
    """
    objective = tables.get("objective", {})
    for key, trusted in (("path", {"path", "name"}), ("advantage", {"advantage"})):
        value = objective.get(key)
        own = value is not None and (key == "path" or value not in ADVANTAGES)
        if own and not any(f"objective.{name}" in given for name in trusted):
            raise UserError(
                f"the packed recipe has objective.{key} = {str(value)[:60]!a}, code of its author, which is not "
                f"packed: give {' or '.join(sorted(trusted))} of your own with --set objective.KEY=VALUE"
            )
    for table in ("megatron", "megatron_ddp", "megatron_optimizer"):
        settings = tables.get(table, {})
        for name, value in settings.items() if isinstance(settings, dict) else ():
            texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str | dict)]
            plain = all(isinstance(text, str) and _PLAIN_TEXT.fullmatch(text) for text in texts)
            if f"{table}.{name}" not in given and texts and (name.endswith(_NAMES_CODE) or not plain):
                raise UserError(
                    f"the packed recipe has [{table}] {name[:60]!a} = {str(value)[:60]!a}, which could name code or a "
                    f"file: give your own with --set {table}.KEY=VALUE"
                )
    for template in _templates([tables.get("data"), tables.get("eval")]):
        with contextlib.suppress(ValueError):  # a template that cannot be parsed cannot be used either
            for _, name, spec, conversion in string.Formatter().parse(template):
                if spec or conversion or not _PLAIN_FIELD.fullmatch(name or ""):
                    raise UserError(
                        f"the packed recipe has the prompt_template {template[:60]!a}: in a packed stage fields may "
                        "only be plain names such as {prompt}"
                    )


def _templates(tree: Any) -> Iterator[str]:
    """Every prompt_template in a table, at any depth."""
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _templates(part)
    if isinstance(tree, dict) and isinstance(tree.get("prompt_template"), str):
        yield tree["prompt_template"]


def _check_overrides(overrides: Overrides, needs_reward: bool) -> None:
    """`UserError` for settings that the stored rollouts depend on.

    needs_reward: whether the packed reward lacks its code or server, which only --set can give.
    """
    allowed = (*(f"eval.{name}" for name in EVALUATION), *(f"rollout.{name}" for name in _ENGINE))
    for name, _ in map(parse_override, overrides):
        if name.startswith("reward.") and not needs_reward:
            raise UserError(
                f"--set {name}: the rollouts are scored already; unpack them without it, and score them again with "
                "`megarl optimize RUN --stage K --output DIR --set reward.KEY=VALUE`"
            )
        if name == "run.seed" or (name not in allowed and not name.startswith((*_OPEN, *_ENGINE_TABLES))):
            raise UserError(
                f"--set {name}: the rollouts depend on it; --set may only change {', '.join(_OPEN)} (not run.seed), "
                f"eval.{', .'.join(EVALUATION)} and rollout.{', .'.join(_ENGINE)}"
            )


def _link_stage(stage: Stage, manifest: Manifest) -> None:
    """Link the stage to the packed files; relative links, since the run directory will be renamed."""
    run = stage.run
    links = {stage.policy: POLICY, stage.rollouts: ROLLOUTS}
    if stage.number:
        links |= {run.base: FIRST_POLICY, stage.previous.checkpoints: CHECKPOINTS}
    for link, name in links.items():
        make_directory(link.parent)
        os.symlink(os.path.relpath(run.root / PACKED / name, link.parent), link)


def _check(stage: Stage, manifest: Manifest) -> None:
    """`UserError` if the policies or rollouts break a rule that later phases rely on without checking it again."""
    folders = [stage.policy] + ([stage.run.base] if stage.number else [])
    for folder in folders:
        info = read_info(folder)
        packed = manifest.below(POLICY if folder == stage.policy else FIRST_POLICY)
        if absent := info.files.keys() - packed.keys():
            raise UserError(f"the packed policy names {min(absent)[:200]!a}, which is not part of the packed stage")
        if folder != stage.policy or list(folder.glob("*.safetensors")):
            sealed.check(folder, "The packed stage is damaged")
        if is_mxfp4(folder):
            raise UserError("the packed policy is quantised, but megarl packs only weights that are not")
        if folder == stage.policy and info.weights_hash != manifest.weights_hash:
            raise UserError("the policy of the packed stage is not the one that its manifest names")
        if info.version != (stage.first_update if folder == stage.policy else 0):
            raise UserError(
                f"the policy of the packed stage has had {info.version} updates, which does not fit its stage"
            )
    _rewrite_rollouts(stage, manifest)


def _check_heldout(stage: Stage, recipe: Recipe) -> None:
    """`UserError` if prompts of the rollouts are held out for evaluation. recipe: its files are where they are now."""
    banned, store = banned_prompts(recipe, stage.policy), RolloutStore(stage.rollouts)
    found = [group.group_id for group in store.read(store.group_ids) if tuple(group.prompt_tokens.tolist()) in banned]
    if found:
        raise UserError(
            f"{len(found)} of {len(store.group_ids)} groups have prompts that are held out for evaluation, the first "
            f"is group {found[0]}: unpack the stage without evaluation, --set eval.every=0 --set eval.every_updates=0"
        )


def _rewrite_rollouts(stage: Stage, manifest: Manifest) -> None:
    """Replace the packed shards, ledger and seal by new ones of the store's writer with the same groups.

    So whatever a stranger's file contains, the run only ever maps files that megarl wrote.
    """
    store, vocabulary = _packed_store(stage, manifest), vocabulary_size(stage.policy)
    packed = stage.rollouts.resolve()
    with tempfile.TemporaryDirectory(dir=packed.parent, prefix=".rollouts-") as scratch:
        mode = store.entries[0].logprob_mode
        rewritten = Path(scratch) / ROLLOUTS
        with RolloutWriter(rewritten, weights_hash=manifest.weights_hash, logprob_mode=mode) as writer:
            for entry in store.entries:
                store.verify(entry)
                writer.append(_read_foreign(packed / entry.shard, entry, vocabulary))
        everything = store.group_ids == list(store.chosen)
        seal(rewritten, stage.groups, None if everything else store.chosen, external=store.external)
        shutil.rmtree(packed)
        os.rename(rewritten, packed)
    for entry in RolloutStore(stage.rollouts).entries:
        for problem in check_shard(stage, stage.rollouts, entry):
            raise UserError(problem)


def _packed_store(stage: Stage, manifest: Manifest) -> RolloutStore:
    """The packed rollouts; `UserError` if ledger, seal and manifest do not agree. Reads no shard."""
    check_seal(stage.rollouts)
    try:
        store = RolloutStore(stage.rollouts)
        chosen: Any = sorted(set(store.chosen))
        unordered = list(store.chosen) != chosen or any(type(group) is not int for group in chosen)
        listed = {entry.shard for entry in store.entries}
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise UserError(f"the ledger of the packed stage is unusable: {error}") from error
    extra = set(manifest.below(ROLLOUTS)) - listed - {SEALED, LEDGER}
    foreign = [group for group in store.group_ids if group not in stage.groups]
    if extra or foreign or unordered or len(chosen) != stage.run.recipe.groups_per_stage or store.missing(chosen):
        what = f"{min(extra)} is not in its ledger" if extra else "its groups are not those of its recipe"
        raise UserError(f"the rollouts of the packed stage do not agree with each other: {what}")
    for entry in store.entries:
        if entry.shard not in manifest.below(ROLLOUTS):
            raise UserError(f"the ledger of the packed stage names {entry.shard[:200]!a}, which is not part of it")
        if entry.weights_hash != manifest.weights_hash:
            raise UserError(f"{entry.shard} was generated by another policy than the packed one")
    return store


def _read_foreign(path: Path, entry: LedgerEntry, vocabulary: int) -> list[Group]:
    """The groups of a shard from a stranger; `UserError`, of one line, unless they encode to the same rows again.

    Arrow decompresses whatever a file says is compressed, so the memory for it is limited.
    """
    try:
        with _limited_memory(_MEMORY + 16 * path.stat().st_size), pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source, memory_pool=pa.system_memory_pool()).get_batch(0)
            batch.validate(full=True)  # Arrow itself trusts the offsets and indices in a file
            shard = Shard(batch)
            groups = [shard.group(group) for group in shard.rows]
            validate(groups)
            for name, (_, tokens) in {"prompt_tokens": shard.prompts, "response_tokens": shard.tokens}.items():
                if tokens.max() >= vocabulary:
                    raise ValueError(f"a token of {name} is outside the vocabulary of {vocabulary}")
            if not FIRST_VERSION <= shard.versions.min() <= shard.versions.max() < -FIRST_VERSION:
                raise ValueError("a policy_version does not fit into 32 bits")
            if tuple(shard.rows) != entry.groups:
                raise ValueError("its groups are not those in its line of the ledger")
            if not to_batch(groups, entry.weights_hash, entry.logprob_mode).equals(batch):
                raise ValueError("its rows are not complete groups in order, with the columns of a shard")
    except Exception as error:  # a file made on purpose can make every step fail
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise UserError(f"{path} is not a valid shard: {reason}") from error
    return groups


@contextlib.contextmanager
def _limited_memory(more: int) -> Iterator[None]:
    """Let this process map at most ``more`` bytes in addition to those that it has; beyond that is a MemoryError."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def describe_unpacked(manifest: Manifest, target: Path) -> str:
    """The text to print after unpacking, with the next command."""
    lines = [f"wrote {target}: stage {manifest.stage}, licence {manifest.licence[:60]!a}"]
    if not any((target / PACKED / POLICY).glob("*.safetensors")):
        lines.append("it has no weights, so it can only be read; to optimize it, unpack it with --model PATH")
    else:
        lines.append(
            f"next    megarl optimize {quoted(target)} --stage {manifest.stage} --output {quoted(f'{target}-b')} "
            "--set objective.name=grpo"
        )
    return "\n".join(lines)
