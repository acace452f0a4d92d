"""An engine is added with one file and one line, shown in a temporary copy of the package."""

import os
import shutil
import subprocess
import sys

from megarl.storage.rollouts import RolloutStore
from tests.helpers import ROOT

MODULE = '''
"""An engine that ends every response after as many tokens as [rollout.short] says."""

from dataclasses import replace

from megarl.rollout.builtin import NEW_INTERPRETER, RECORDS_EXPERTS, BuiltinEngine, check


def build(recipe, stage, policy_dir, version, routed_experts):
    engine = ShortEngine(policy_dir, version)
    engine.tokens = recipe.rollout_of(stage).options("short")["tokens"]
    return engine


class ShortEngine(BuiltinEngine):
    def submit(self, number, request):
        super().submit(number, replace(request, sampling=replace(request.sampling, budget=self.tokens)))

    def step(self):
        return [(number, replace(one, finish_reason="timeout")) for number, one in super().step()]
'''
LINE = '    "short": Engine("megarl.rollout.short"),\n'
RUN = """
import os, sys
from pathlib import Path
import megarl
from megarl.commands.stages.pack import without_machine
from megarl.phases.rollout import rollout
from megarl.recipe.load import load_recipe
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir

assert Path(megarl.__file__).is_relative_to(sys.argv[1])
recipe = load_recipe(sys.argv[2], ["rollout.engine=short", "rollout.short.tokens=3", *sys.argv[4:]])
run = RunDir.create(Path(sys.argv[3]), recipe)
copy_policy(recipe.model.path, recipe.model.tokenizer_path, run.stage(0).policy)
rollout(run.stage(0))
tables = recipe.model_dump()
assert "short" in tables["rollout"] and "short" not in without_machine(tables, "policy", {})["rollout"]
"""


def test_an_engine_is_one_file_and_one_line(recipe, tmp_path):
    package, root = tmp_path / "package", tmp_path / "run"
    copy = shutil.copytree(ROOT / "megarl", package / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "rollout/short.py").write_text(MODULE)
    table = copy / "recipe/names.py"
    table.write_text(table.read_text().replace("ENGINES = {\n", "ENGINES = {\n" + LINE))
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    settings = ["rollout.max_response_tokens=12", "reward.require_stop=false"]
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(package), str(recipe), str(root), *settings],
        env={**os.environ, **ranks, "PYTHONPATH": str(package)}, cwd=package, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    store = RolloutStore(root / "stages/000/rollouts")
    groups = store.read(store.group_ids)
    assert len(groups) == 24
    assert max(len(response.tokens) for group in groups for response in group.responses) == 3
