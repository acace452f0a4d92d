"""What no working engine returns is generated again and counted.

`tests/rollout/test_engine.py` has how often, before it is an error.
"""

from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from megarl.views.audit import audit
from megarl.views.report import write_report
from tests.helpers import events, metrics
from tests.phases.commands import settings, train

SHORT = ("schedule.stages=1", "schedule.updates_per_stage=2", "run.rehearse=false", "run.max_restarts=0")


def test_faulty_responses_are_generated_again_and_counted(recipe, tmp_path):
    train(recipe, tmp_path / "run", *settings(*SHORT), mutant="an_engine_errs_now_and_then")
    run = RunDir.open(tmp_path / "run")
    trained = sum(line.get("discarded_responses", 0) for line in metrics(run))
    evaluated = sum(event.get("discarded", 0) for event in events(run, "evaluation"))
    assert trained > 0 and evaluated > 0
    logs = "".join(path.read_text() for path in run.logs.rglob("rank_*.log"))
    assert trained + evaluated == logs.count("is generated again with another seed")
    stage = run.stage(0)
    stored = RolloutStore(stage.rollouts).read(list(stage.groups))
    assert sum(r.discarded or 0 for group in stored for r in group.responses) == trained
    told = [event["discarded"] for event in events(run, "rollout_progress") if "discarded" in event]
    assert told[-1] == trained
    assert audit(run.root, 10).problems == []
    page = write_report([run.root], tmp_path / "report.html").read_text()
    assert "Faulty responses generated again</th>" in page
