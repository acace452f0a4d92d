"""An engine is added with one file and one line, shown in a temporary copy of the package."""

import os
import shutil
import subprocess
import sys

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
import sys
from pathlib import Path
import megarl
from megarl.commands.stages.pack import without_machine
from megarl.rollout import build_engine
from megarl.rollout.engine import Request, Sampling, answers
from tests.rollout.engines import stage_recipe

assert Path(megarl.__file__).is_relative_to(sys.argv[1])
recipe = stage_recipe("short", model={"path": sys.argv[2]}, rollout={"short": {"tokens": 3}})
engine = build_engine(recipe, 0, Path(sys.argv[2]), 0)
completions = answers(engine, Request([[8]], Sampling(1.0, 12, 2, (), (0, 1))))
assert [(len(one.tokens), one.finish_reason) for one in completions] == [(3, "timeout")] * 2
tables = recipe.model_dump()
assert "short" in tables["rollout"] and "short" not in without_machine(tables, "policy", {})["rollout"]
"""


def test_an_engine_is_one_file_and_one_line(moe_dir, tmp_path):
    package = tmp_path / "package"
    copy = shutil.copytree(ROOT / "megarl", package / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "rollout/short.py").write_text(MODULE)
    table = copy / "recipe/names.py"
    table.write_text(table.read_text().replace("ENGINES = {\n", "ENGINES = {\n" + LINE))
    command = [sys.executable, "-c", RUN, str(package), str(moe_dir)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (package, ROOT)))}
    result = subprocess.run(command, env=environment, cwd=package, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
