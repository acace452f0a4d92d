"""A phase is one module with a function of its name, and one line in the table of phases."""

from megarl.phases import PHASES, Phase
from megarl.recipe.load import load_recipe
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir
from megarl.views.progress import Progress
from megarl.workers.launcher import run_phase
from megarl.workers.node_rank import NodeRank
from megarl.workers.nodes import Nodes
from tests.helpers import events
from tests.zygote import new_fork_server


def count(stage):
    """The phase "count": counts the groups of a stage."""
    stage.log_event("counted", phase="count", groups=stage.run.recipe.groups_per_stage)


def test_a_phase_is_one_file_and_one_line(recipe, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(PHASES, "count", Phase(__name__, saves=False, title="count of the groups"))
    end_fork_server = new_fork_server(monkeypatch.setattr)  # a fork of this process, with the new phase
    run = RunDir.create(tmp_path / "run", load_recipe(recipe))
    copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, run.stage(0).policy)
    with Nodes(NodeRank()) as nodes, Progress(run.root, run.recipe):
        run_phase(nodes, run.stage(0), "count", 1)
    end_fork_server()
    assert [event["groups"] for event in events(run, "counted")] == [24]
    assert capfd.readouterr().out.splitlines()[0].split(" ", 1)[1] == "count of the groups starts"
