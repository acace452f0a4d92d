"""``megarl sql``: rows equal those of the store, and a query can read only the run."""

import json
import os
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from megarl.errors import UserError
from megarl.storage.rollouts import Group
from megarl.views import sql
from megarl.views.sql import as_table, query
from tests.helpers import read_lines
from tests.phases.commands import succeed
from tests.views.synthetic_run import (
    ACCURACY,
    HOSTILE,
    WORDS,
    make_stored_run,
    random_groups,
    response,
    store,
    two_stages,
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    root, groups = two_stages(tmp_path_factory.mktemp("sql") / "run")
    store_evaluation(root, random_groups([0, 1], samples=2, seed=5))
    return root, groups


def store_evaluation(root, groups):
    asked = root / "evaluations/heldout"
    asked.mkdir(parents=True)
    (asked / "prompts.jsonl").write_text("")
    store(asked / "update_000096", [groups])


def rows(root, text):
    return [tuple(row.values()) for row in query(root, text)]


def test_responses_are_those_of_the_store(stored):
    root, groups = stored
    expected = [
        (stage, g.group_id, sample, r.reward, r.finish_reason, len(r.tokens), r.policy_version, r.tokens.tolist())
        for stage, g in groups
        for sample, r in enumerate(g.responses)
    ]
    columns = "stage, prompt, sample, reward, finish_reason, length, policy_version, response_tokens"
    assert rows(root, f"select {columns} from responses order by prompt, sample") == expected
    (total,) = rows(root, "select count(*), sum(list_sum(rollout_logprobs)), bool_and(correct = reward) from responses")
    logprobs = [r.rollout_logprobs for _, g in groups for r in g.responses]
    assert total == (len(expected), pytest.approx(sum(float(x.sum()) for x in logprobs), rel=1e-5), True)


def test_the_row_of_a_prompt_is_json(tmp_path):
    """In shards with and without rows."""
    levels = {0: {"source": "a.csv", "level": 1}, 1: {"level": 2.5}, 2: {"level": 1}, 3: None}
    first, second = random_groups([0, 1, 2]), random_groups([3])
    first = [replace(group, row=json.dumps(levels[group.group_id])) for group in first]
    root = make_stored_run(tmp_path / "run", [[first, second]])
    store_evaluation(root, first[:2])
    text = "select prompt_row->>'level' as level, count(*) from {} group by level"
    assert dict(rows(root, text.format("responses"))) == {"1": 8, "2.5": 4, None: 4}
    assert dict(rows(root, text.format("evaluation_responses"))) == {"1": 4, "2.5": 4}
    assert rows(root, "select distinct prompt_row->>'source' from responses where prompt < 2 order by 1") == [
        ("a.csv",),
        (None,),
    ]


def test_a_query_may_name_a_table_twice(stored):
    """An Arrow stream would be empty when it is scanned for the second time."""
    text = "select count(*) from responses a join responses b using (prompt, sample)"
    assert rows(stored[0], text) == [(48,)]


def test_decode_turns_tokens_into_text(stored):
    root, groups = stored
    texts = ["".join(WORDS[t] for t in r.tokens.tolist()) for _, g in groups for r in g.responses]
    decoded = rows(root, "select decode(response_tokens) from responses order by prompt, sample")
    assert [text for (text,) in decoded] == texts
    answers = sum("answer" in text for text in texts)
    assert rows(root, "select count(*) from responses where decode(response_tokens) like '%answer%'") == [(answers,)]
    assert rows(root, "select decode(null), decode([])") == [(None, "")]


def test_metrics_and_events(stored):
    root = stored[0]
    lines = read_lines(root / "metrics.jsonl")
    expected = [(line["update"], line["reward/mean"]) for line in lines]
    assert rows(root, 'select "update", "reward/mean" from metrics order by 1') == expected
    nested = "entropy_by_ratio->'counts'->0->0"
    (count, *_), *_ = rows(root, f"select {nested} from metrics where entropy_by_ratio is not null")
    assert json.loads(count) == next(r for r in lines if "entropy_by_ratio" in r)["entropy_by_ratio"]["counts"][0][0]
    accuracies = rows(root, "select (fields->>'accuracy')::double from events where event = 'evaluation'")
    assert accuracies == [(accuracy,) for accuracy in ACCURACY]
    seconds = rows(root, "select sum((fields->>'seconds')::double) from events where event = 'phase_end'")
    assert seconds == [(100.0,)]
    assert rows(root, "select suite, update, count(*) from evaluation_responses group by all") == [("heldout", 96, 4)]


def test_columns_that_a_shard_leaves_out_are_null_or_the_reward(tmp_path):
    """Before the stage is sealed, a shard counts once a whole line of the ledger names it."""
    root = make_stored_run(tmp_path / "run", [])
    assert rows(root, "select count(*) from responses") == [(0,)]
    plain = random_groups([0], samples=2)
    versions = np.array([0, 1, 2], np.int32)
    special = response([1, 2, 3], 0.5, correct=1.0, answer="x", policy_versions=versions, discarded=2)
    store(root / "stages/000/rollouts", [plain, [Group(1, plain[0].prompt_tokens, (special,))]], sealed=False)
    ledger = root / "stages/000/rollouts/ledger.jsonl"
    last = ledger.read_bytes().splitlines(keepends=True)
    text = "select correct, answer, policy_versions, discarded from responses order by prompt, sample"
    of_plain = [(r.reward, None, None, None) for r in plain[0].responses]
    ledger.write_bytes(last[0] + last[1][:40])
    assert rows(root, text) == of_plain
    ledger.write_bytes(b"".join(last))
    assert rows(root, text) == [*of_plain, (1.0, "x", [0, 1, 2], 2)]
    (root / "metrics.jsonl").unlink()
    (root / "events.jsonl").unlink()
    assert rows(root, "select count(*) from metrics, events") == [(0,)]


@pytest.mark.parametrize(
    "text",
    [
        "select * from read_csv('{file}')",
        "select * from '{file}'",
        "copy metrics to '{run}/metrics.jsonl'",
        "attach '{folder}/new.db'",
        "install httpfs",
        "select * from 'https://example.com/x.csv'",
        "set enable_external_access = true",
        "set memory_limit = '100GB'",
        "select * from table_of_this_process",
    ],
)
def test_a_query_reaches_nothing_but_the_run(stored, tmp_path, monkeypatch, text):
    # with its default settings DuckDB also finds variables of its caller and of the caller's module
    monkeypatch.setattr(sql, "table_of_this_process", pa.table({"a": [1]}), raising=False)
    (tmp_path / "file.csv").write_text("a,b\n1,2\n")
    before = (stored[0] / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="^SQL: "):
        rows(stored[0], text.format(file=tmp_path / "file.csv", folder=tmp_path, run=stored[0]))
    assert os.listdir(tmp_path) == ["file.csv"]
    assert (stored[0] / "metrics.jsonl").read_bytes() == before


def test_memory_is_limited_and_an_error_is_one_line_of_duckdb(stored):
    """The limit is 1 GB, or the given one."""
    assert rows(stored[0], "select current_setting('memory_limit')") == [("953.6 MiB",)]
    text = "select string_agg(repeat('x', 1000)) from range(1000000)"
    with pytest.raises(UserError, match="^SQL: Out of Memory Error"):
        list(query(stored[0], text, "20MB"))
    with pytest.raises(UserError, match='^SQL: Binder Error: Referenced column "nope" not found.*$'):
        rows(stored[0], "select nope from responses")


def test_json_and_table_of_the_command(stored):
    root, groups = stored
    text = "select stage, count(*) as n, avg(reward) as mean from responses group by stage order by stage"
    found = [json.loads(line) for line in succeed("sql", root, text, "--json").stdout.splitlines()]
    for stage, row in enumerate(found):
        rewards = [r.reward for s, g in groups for r in g.responses if s == stage]
        assert row == {"stage": stage, "n": 24, "mean": pytest.approx(sum(rewards) / 24)}
    head, *lines = succeed("sql", root, text).stdout.splitlines()
    assert head.split() == ["stage", "n", "mean"] and len(lines) == 2


def test_a_table_is_harmless_to_a_terminal(tmp_path):
    (group,) = random_groups([0])
    hostile = replace(group, responses=tuple(response([WORDS.index(word)]) for word in HOSTILE))
    root = make_stored_run(tmp_path / "run", [[[hostile]]])
    table = as_table(query(root, 'select decode(response_tokens) as "t\x1b" from responses'))
    assert len(table.splitlines()) == 1 + len(HOSTILE)
    assert all(line.isprintable() for line in table.splitlines())
    many = as_table(query(root, "select * from range(1000)"))
    assert len(many.splitlines()) == 102 and many.endswith("the first 100 rows; --json prints all")
