"""A phase is added with one file and one line, shown in a temporary copy of the package."""

import os
import shutil
import subprocess
import sys

from megarl.recipe.load import load_recipe
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir
from tests.helpers import ROOT, events

MODULE = '''
"""The phase "count": counts the groups of a stage."""

from megarl.storage.run_dir import Stage


def count(stage: Stage) -> None:
    stage.log_event("counted", phase="count", groups=stage.run.recipe.groups_per_stage)
'''
LINE = '    "count": Phase("megarl.phases.count", saves=False, title="count of the groups"),\n'
RUN = """
import sys
from pathlib import Path
import megarl
from megarl.storage.run_dir import RunDir
from megarl.views.progress import Progress
from megarl.workers.launcher import run_phase
from megarl.workers.node_rank import NodeRank
from megarl.workers.nodes import Nodes

run = RunDir.open(Path(sys.argv[1]))
assert Path(megarl.__file__).is_relative_to(sys.argv[2])
with Nodes(NodeRank()) as nodes, Progress(run.root, run.recipe):
    run_phase(nodes, run.stage(0), "count", 1)
"""


def test_a_phase_is_one_file_and_one_line(recipe, tmp_path):
    package = tmp_path / "package"
    copy = shutil.copytree(ROOT / "megarl", package / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "phases/count.py").write_text(MODULE)
    table = copy / "phases/__init__.py"
    table.write_text(table.read_text().replace("PHASES = {\n", "PHASES = {\n" + LINE))
    run = RunDir.create(tmp_path / "run", load_recipe(recipe))
    copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, run.stage(0).policy)
    command = [sys.executable, "-c", RUN, str(run.root), str(package)]
    result = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(package)}, cwd=package, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert [event["groups"] for event in events(run, "counted")] == [24]
    assert result.stdout.splitlines()[0].split(" ", 1)[1] == "count of the groups starts"
