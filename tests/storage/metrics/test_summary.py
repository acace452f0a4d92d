"""Metrics by columns of the prompts, against plain sums over the responses."""

import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.storage.metrics.summary import VALUES, by_columns
from megarl.storage.metrics.trackers import RULE
from megarl.storage.rollouts import Group, Response
from megarl.views.report import write_report
from megarl.views.sql import query
from tests.helpers import five_letters, read_lines
from tests.phases.commands import settings, train

LEVELS = ["easy", "hard", None, "easy", "with / and <b>"]


def make_groups(columns):
    noise = np.random.default_rng(0)

    def response():
        n = int(noise.integers(1, 9))
        reward, right = float(noise.random()), float(noise.integers(2))
        return Response(np.ones(n, np.int32), -np.ones(n, np.float32), reward, "stop", 0, correct=right)

    return [
        Group(number, np.ones(2, np.int32), tuple(response() for _ in range(3)), row and json.dumps(row))
        for number, row in enumerate(columns)
    ]


def test_every_value_of_a_column_has_its_own_means():
    """Also what is no value, and what has no trained tokens; the others: `test_metrics_of_a_run_agree...`."""
    groups = make_groups([level and {"level": level, "source": "a.csv"} for level in LEVELS])
    tokens = np.array([[10, 1], [20, 5], [30, 0], [10, 9], [0, 0]])
    found = by_columns(groups, ["level", "source"], tokens)
    members = {"easy": [0, 3], "hard": [1], "none": [2], "with___and__b_": [4]}
    assert {name.split("/")[2] for name in found if name.startswith("by/level/")} == members.keys()
    for value, own in members.items():
        responses = [r for n in own for r in groups[n].responses]
        assert found[f"by/level/{value}/accuracy"] == pytest.approx(np.mean([r.correct for r in responses]))
        assert found[f"by/level/{value}/reward"] == pytest.approx(np.mean([r.reward for r in responses]))
    muted = {name.split("/")[2]: found[name] for name in found if name.startswith("by/level/") and "muted" in name}
    assert muted == pytest.approx({"easy": 10 / 20, "hard": 5 / 20, "none": 0.0})


def test_metrics_of_a_run_agree_with_its_responses(recipe, tmp_path):
    """On two data-parallel ranks: accuracy and length as ``megarl sql`` gives them, muted tokens as over all values.

    TensorBoard has them too, and the evaluations with samples of their responses."""
    words = tmp_path / "words.csv"
    lines = (f"{word},{word[0]},{word.count('a')}" for word in five_letters())
    words.write_text("\n".join(["prompt,answer,level", *lines]))
    wanted = ("schedule.stages=1", "eval.every=1", "run.tensorboard=true", "actor.processes_per_node=2")
    wanted += (f"data.train='{words}'", "metrics.by=['level', 'source']", "objective.veto_threshold=0.3")
    root = tmp_path / "run"
    train(recipe, root, *settings(*wanted, "optimizer.lr=0.01"))
    muted = 0.0
    for line in read_lines(root / "metrics.jsonl"):
        last = 4 * line["update"]  # prompts
        text = f"from responses where prompt >= {last - 4} and prompt < {last}"
        level = "prompt_row->>'level' as level"
        levels = list(
            query(root, f"select {level}, avg(correct) a, avg(length) n, sum(length) t {text} group by level")
        )
        names = {name.split("/")[2] for name in line if name.startswith("by/level/")}
        assert names == {row["level"] for row in levels}
        for row in levels:
            assert line[f"by/level/{row['level']}/accuracy"] == pytest.approx(row["a"])
            assert line[f"by/level/{row['level']}/response_tokens"] == pytest.approx(row["n"])
        without = sum(line[f"by/level/{row['level']}/muted_fraction"] * float(row["t"]) for row in levels)
        assert without / line["trained_tokens"] == pytest.approx(1 - line["kept_fraction"])
        assert line["by/source/words.csv/muted_fraction"] == pytest.approx(1 - line["kept_fraction"])
        muted = max(muted, without)
    assert muted > 0
    assert "Training accuracy by level" in write_report([root], tmp_path / "report.html").read_text()
    events = EventAccumulator(str(root / "tensorboard")).Reload()
    assert events.Scalars("by/source/words.csv/accuracy")[-1].value == pytest.approx(line["reward/mean"])
    logged = [event for event in read_lines(root / "events.jsonl") if event["event"] == "evaluation"]
    found = [(point.step, point.value) for point in events.Scalars("evaluation/heldout/accuracy")]
    assert found == [(event["update"], pytest.approx(event["accuracy"])) for event in logged] and len(found) == 2
    texts = events.Tensors("samples/heldout/text_summary")
    assert [text.step for text in texts] == [point[0] for point in found]
    shown = texts[0].tensor_proto.string_val[0].decode().split(RULE)
    assert len(shown) == 4 and all(text.startswith("    ") and "=" in text for text in shown)


def test_only_the_most_frequent_values_of_a_column_have_metrics():
    rows = [{"id": number} for number in range(VALUES + 5)] + [{"id": VALUES + 4}]
    found = by_columns(make_groups(rows), ["id"], None)
    values = {name.split("/")[2] for name in found}
    assert len(values) == VALUES and str(VALUES + 4) in values
