"""``megarl stage pack``: one sealed stage as a directory that another machine can optimize and the Hub can hold.

It has the responses as Parquet, the policy as a Hugging Face directory, prompt files, and a manifest in JSON with the
recipe and the checksum of every file. The state of an optimizer is never packed: the stage becomes the first one of a
run, whose policy is the run's model.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from megarl.commands.scratch import open_staged
from megarl.data.tokenizer import TEMPLATES, files_of
from megarl.errors import UserError
from megarl.recipe.rollout_table import ENGINE_KEYS
from megarl.storage.checked_json import decode, write_checked
from megarl.storage.checkpoints import FileSum
from megarl.storage.files import atomic_directory, check_new, file_sha256, make_directory
from megarl.storage.policies import copy_auxiliary, copy_weights, read_info
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import Stage, checks
from megarl.storage.run_dir.retention import require_policy
from megarl.storage.shards import write_parquet

MANIFEST, CARD = "manifest.json", "README.md"
POLICY, ROLLOUTS, FILES = "policy", "rollouts", "files"
FORMAT = 3
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,99}"
_NAME = re.compile(rf"{ROLLOUTS}/\d+\.parquet|{FILES}/{_PART}|{POLICY}/({TEMPLATES}/)?{_PART}")
# files that could be executed or unpickled when a model is loaded; megarl needs none of them
_CODE = (".py", ".pyc", ".so", ".sh", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack", ".zip")
_CARD = """---
license: {licence}
pretty_name: {name}
tags: [megarl, reinforcement-learning]
configs: [{{config_name: default, data_files: "rollouts/*.parquet"}}]
---

# {name}

Frozen rollouts of a language model: the {responses:,} responses that stage {stage} of a megarl run trains on, each with
its tokens, the log-probs at which they were sampled, and its reward. They were sampled from a policy that began as
{model}, whose weights are {weights} (sha256 `{weights_hash}`).

```sh
megarl stage unpack THIS runs/{name}{option}     # every checksum is verified
megarl optimize runs/{name} --stage 0 --output runs/grpo --set objective.name=grpo
```
"""


@dataclass(frozen=True)
class Manifest:
    """The contents of a packed stage."""

    stage: int  # its number in the run that it comes from
    model: str  # name of the run's base model, only for people
    weights_hash: str  # of the policy that generated the rollouts
    logprob_mode: str  # which distribution the stored log-probs belong to, as the engine names it
    external: bool  # whether the recipe's data does not have the prompts of the groups with these numbers
    licence: str
    recipe: dict[str, Any]  # its tables, see `without_machine`
    files: dict[str, FileSum]  # by name, without the manifest itself and the card, which only people read

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of a packed stage, which may come from a stranger; `UserError` if it is not valid."""
        try:
            fields = decode((folder / MANIFEST).read_bytes())
            if (found := fields.pop("format")) != FORMAT:
                raise ValueError(f"its format is {found!a:.20}, but this version of megarl reads {FORMAT}")
            files = {name: FileSum(**sums) for name, sums in fields.pop("files").items()}
            manifest = cls(**fields, files=files)
            for name in files:
                check_name(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{folder / MANIFEST} is not the manifest of a packed stage: {error}") from error
        return manifest

    def write(self, folder: Path) -> None:
        write_checked(folder / MANIFEST, {"format": FORMAT} | asdict(self))

    @property
    def prompts(self) -> dict[str, str]:
        """{name: sha256} of the recipe's prompt files and templates."""
        return {name: sums.sha256 for name, sums in self.files.items() if name.startswith(f"{FILES}/")}

    @property
    def has_weights(self) -> bool:
        return any(name.startswith(f"{POLICY}/") and name.endswith(".safetensors") for name in self.files)


def check_name(name: str) -> None:
    """ValueError for a name that no file of a packed stage has."""
    if not _NAME.fullmatch(name) or name.endswith(_CODE):
        raise ValueError(f"{name!a:.200} is not the name of a file in a packed stage")


def pack(run_dir: Path, number: int, output: Path, licence: str, weights: bool) -> Manifest:
    """Pack the groups that stage ``number`` of a run trains as the directory ``output``.

    weights: include the policy's weights. Stages after the first always include them, since these exist nowhere else.
    `UserError` for a stage that is not sealed, or is damaged.
    """
    stage = open_staged(run_dir, number)
    check_new(output)
    if not stage.is_sealed():
        raise UserError(f"{stage.rollouts} is not sealed: only a complete stage can be packed")
    if stage.run.recipe.leaves_groups:
        raise UserError(
            "with rollout.token_budget a stage trains groups that earlier stages began: it cannot be packed alone"
        )
    require_policy(stage)
    stage.run.check_prompts()
    for directory in (stage.rollouts, stage.policy):
        checks.check(directory, "Restore it from a copy before it is packed")
    with atomic_directory(output.resolve()) as folder:
        return _pack(stage, folder, licence, weights or number > 0)


def _pack(stage: Stage, folder: Path, licence: str, weights: bool) -> Manifest:
    recipe, store = stage.run.recipe, RolloutStore(stage.rollouts)
    copy_policy_files(stage.policy, folder / POLICY, weights)
    make_directory(folder / ROLLOUTS)
    chosen, responses = set(store.chosen), 0
    for number, entry in enumerate(store.entries):
        if groups := [_of_first_stage(group, stage) for group in store.read(entry.groups) if group.group_id in chosen]:
            write_parquet(folder / ROLLOUTS / f"{number:05d}.parquet", groups, entry.weights_hash, entry.logprob_mode)
            responses += sum(len(group.responses) for group in groups)
    names = {name: _packed_name(Path(name)) for name in (*recipe.prompt_files(), *recipe.template_files())}
    make_directory(folder / FILES)
    for path, name in names.items():
        shutil.copyfile(path, folder / name)
    manifest = Manifest(
        stage=stage.number,
        model=re.sub(r"[^A-Za-z0-9_.+-]", "_", recipe.model.path.name),
        weights_hash=read_info(stage.policy).weights_hash,
        logprob_mode=store.entries[0].logprob_mode,
        external=store.external or stage.number > 0,
        licence=licence,
        recipe=_portable(stage, names),
        files=sums_below(folder),
    )
    (folder / CARD).write_text(_card(manifest, responses, re.sub(r"[^A-Za-z0-9_.-]", "_", stage.run.root.name)))
    manifest.write(folder)
    return Manifest.read(folder)  # which refuses names that unpacking would refuse


def _of_first_stage(group: Group, stage: Stage) -> Group:
    """The group as one of the first stage of a run that begins with the policy of ``stage``."""
    updates = stage.first_update
    responses = (
        replace(
            response,
            policy_version=response.policy_version - updates,
            policy_versions=None if response.policy_versions is None else response.policy_versions - updates,
        )
        for response in group.responses
    )
    return replace(group, group_id=group.group_id - stage.groups.start, responses=tuple(responses))


def copy_policy_files(policy: Path, target: Path, weights: bool) -> None:
    """Copy a policy without hidden files and without files that could be executed or unpickled."""
    make_directory(target)
    copy_auxiliary(policy, target)
    for name in files_of(target):
        if name.startswith(".") or name.endswith(_CODE):
            (target / name).unlink()
    if weights:
        copy_weights(policy, target)


def sums_below(folder: Path) -> dict[str, FileSum]:
    """{name: size and checksum} of every file below ``folder``."""
    return {str(path.relative_to(folder)): FileSum.of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _packed_name(path: Path) -> str:
    """A unique name for a prompt file or template."""
    return f"{FILES}/{file_sha256(path)[:12]}_{re.sub(r'[^A-Za-z0-9_.-]', '_', path.name)[-60:]}"


def _card(manifest: Manifest, responses: int, name: str) -> str:
    """The text of README.md, with the metadata that the Hugging Face Hub reads. name: of the run."""
    weights, option = ("included", "") if manifest.has_weights else ("not included", " --model PATH")
    return _CARD.format(**vars(manifest), responses=responses, name=name, weights=weights, option=option)


def _portable(stage: Stage, names: dict[str, str]) -> dict[str, Any]:
    """The tables of the recipe without paths, programs and servers of this machine."""
    recipe = stage.run.recipe
    tables = without_machine(recipe.model_dump(mode="json", exclude_none=True), POLICY, names)
    # of code, only the name of its file is told, so that unpacking asks for it
    own = {"name": recipe.objective.definition, "advantage": recipe.objective.advantage}
    tables["objective"] |= {key: Path(value).name for key, value in own.items()}
    if stage.number:
        tables["schedule"]["stages"] = 1
    return tables


def without_machine(tables: dict[str, Any], model: str, names: dict[str, str]) -> dict[str, Any]:
    """A copy of a recipe's tables without engine options, programs, servers, trackers and own code.

    model: the path of the model. names: what the paths of prompt files and templates become.
    """
    left_out = {"objective": ("path",), "reward": ("path", "service"), "rollout": ENGINE_KEYS}
    kept = {name: table for name, table in tables.items() if name != "stages"} | {"model": {"path": model}}
    for name, keys in left_out.items():
        kept[name] = {key: value for key, value in tables.get(name, {}).items() if key not in keys}
    kept["reward"]["parts"] = [part for part in kept["reward"].get("parts", []) if part.get("kind") != "python"]
    kept["run"] = {key: value for key, value in tables.get("run", {}).items() if key == "seed"}
    return kept | {name: _replaced(tables.get(name, {}), names) for name in ("data", "eval")}


def _replaced(tree: Any, names: dict[str, str]) -> Any:
    """A copy of a table, at any depth, in which every string that is a key of ``names`` is replaced by its value."""
    if isinstance(tree, dict):
        return {key: _replaced(value, names) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_replaced(value, names) for value in tree]
    return names.get(tree, tree) if isinstance(tree, str) else tree
