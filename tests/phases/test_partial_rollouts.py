"""Partial rollouts: responses that stop at a token budget and continue in the next stage, also after kills."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.phases.rollout_worker import RolloutWorker, _Requests
from megarl.planner.preflight import check_recipe
from megarl.recipe.load import load_recipe
from megarl.storage.checked_json import decode, write_checked
from megarl.storage.ledger import SEALED, sealed_groups
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from megarl.storage.shards import any_unfinished
from megarl.views.audit import audit
from megarl.views.progress import describe_event
from megarl.views.run_state import RunState
from megarl.views.sql import query
from tests.helpers import events, metrics
from tests.phases import commands
from tests.phases.commands import train
from tests.phases.mutants import nan, returning
from tests.phases.test_kill import assert_same_run, kill_at

TRAINED, CANDIDATES, STAGES, BUDGET = 6, 18, 3, 2  # groups that a stage trains, its candidates, stages, tokens
SETTINGS = {
    "rollout__token_budget": BUDGET,
    "rollout__max_response_tokens": 6,
    "rollout__oversample": CANDIDATES / TRAINED,
    "rollout__temperature": 2.0,  # about half of the responses are longer than the budget
    "rollout__groups_per_chunk": 4,
    "reward__require_stop": False,
    "schedule__stages": STAGES,
    "schedule__updates_per_stage": 3,
    "schedule__prompts_per_update": 2,
    "optimizer__lr": 1e-2,
    "eval__every": 0,
}


def options(**settings):
    changed = SETTINGS | settings
    return commands.settings(*(f"{key.replace('__', '.')}={json.dumps(changed[key])}" for key in changed))


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    train(recipe, path, *options())
    return RunDir.open(path)


def stores(stage):
    """(the store of complete groups, the store of groups that were unfinished at the budget)."""
    return RolloutStore(stage.rollouts), RolloutStore(stage.unfinished)


def test_every_group_is_trained_once_or_carried(undisturbed):
    in_play, trained = [], []
    for stage in undisturbed.stages():
        in_play += stage.groups
        complete, cut = stores(stage)
        assert list(stage.candidates()) == in_play and len(in_play) == CANDIDATES
        assert set(complete.group_ids) | set(cut.group_ids) == set(in_play)
        assert complete.chosen == complete.group_ids[:TRAINED]
        trained += complete.chosen
        in_play = [group for group in in_play if group not in complete.chosen]
        assert sealed_groups(stage.rollouts, "carried") == in_play
        assert cut.chosen == [group for group in cut.group_ids if group not in complete.group_ids]
        finished = max(0, TRAINED - (CANDIDATES - len(cut.group_ids)))  # the first ones, if too few are complete
        assert [group for group in cut.group_ids if group in complete.group_ids] == cut.group_ids[:finished]
        (event,) = [e for e in events(undisturbed, "partial_rollouts") if e["stage"] == stage.number]
        counts = {"chosen": TRAINED, "carried": CANDIDATES - TRAINED, "finished": finished}
        assert event.items() >= (counts | {"complete": len(complete.group_ids) - finished}).items()
    assert sorted([*trained, *in_play]) == list(range(CANDIDATES + (STAGES - 1) * TRAINED))
    assert [update["update"] for update in metrics(undisturbed)] == list(range(1, 10))
    assert not events(undisturbed, "resume")


def test_a_response_gets_its_token_budget_in_each_stage(undisturbed):
    versions_seen = set()
    for stage in undisturbed.stages():
        complete, cut = stores(stage)
        for group in cut.read(cut.group_ids):
            assert all(response.reward == 0 for response in group.responses) and any_unfinished(group.responses)
            for response in group.responses:
                budget = BUDGET * len(np.unique(response.versions))
                assert response.finish_reason != "unfinished" or len(response.tokens) == budget < 6
        for group in complete.read(complete.group_ids):
            for response in group.responses:
                assert response.finish_reason in ("stop", "length")
                versions, tokens = np.unique(response.versions, return_counts=True)
                assert (tokens[:-1] == BUDGET).all() and (tokens[-1] <= BUDGET or group.group_id in cut.group_ids)
                versions_seen.add(tuple(versions.tolist()))
    assert {(0, 3), (0, 3, 6)} <= versions_seen, "the test needs responses that two and three stages have sampled"


def test_staleness_is_counted_token_by_token(undisturbed):
    for update in metrics(undisturbed):
        stage = undisturbed.stage(update["stage"])
        store, now = stores(stage)[0], update["update"] - 1
        groups = store.read(store.chosen[2 * (now - stage.first_update) :][:2])
        found = [now - int(v) for group in groups for response in group.responses for v in response.versions]
        assert update["staleness/tokens"] == {str(lag): found.count(lag) for lag in sorted(set(found))}
        assert update["staleness"] == max(found)
    assert max(update["staleness"] for update in metrics(undisturbed)) > 3


@pytest.fixture(scope="module")
def worker(undisturbed):
    made = RolloutWorker(undisturbed.recipe, 0, undisturbed.stage(0).policy)
    yield made
    made.close()


def generate(worker, groups, budget, found):
    """{id: group} of ``groups``, of which ``found`` has those that were begun."""
    chunks, draws = [groups, None], worker.sampling(budget=budget)
    earlier = (lambda number: found[number].responses) if found else (lambda number: ())
    portions = worker.generate(lambda: chunks.pop(0), worker.prompts.train, draws, earlier=earlier)
    return {group.group_id: group for portion in portions for group in portion}


def unfinished(found):
    return [number for number, group in found.items() if any_unfinished(group.responses)]


def test_the_budget_changes_no_response_of_the_same_policy(worker, monkeypatch):
    """Requests that are done are forgotten, and with them their responses."""
    begin, requests = _Requests.__init__, []
    monkeypatch.setattr(_Requests, "__init__", lambda self, *given: requests.append(self) or begin(self, *given))
    whole, found = generate(worker, list(range(8)), math.inf, {}), generate(worker, list(range(8)), BUDGET, {})
    assert len(unfinished(found)) > 2
    while left := unfinished(found):
        found |= generate(worker, left, BUDGET, found)
    for number, group in whole.items():
        for mine, theirs in zip(found[number].responses, group.responses, strict=True):
            assert mine.tokens.tolist() == theirs.tokens.tolist()
            assert (mine.reward, mine.finish_reason) == (theirs.reward, theirs.finish_reason)
            np.testing.assert_allclose(mine.rollout_logprobs, theirs.rollout_logprobs, rtol=0, atol=1e-4)
    assert len(requests) > 2 and not any(made._asked for made in requests)


def test_discarded_attempts_are_counted_over_all_stages(worker, monkeypatch):
    """Two attempts at each response of a group were discarded before; one more attempt at a response is now."""
    found = generate(worker, list(range(8)), BUDGET, {})
    number = unfinished(found)[0]
    before = tuple(replace(response, discarded=2) for response in found[number].responses)
    monkeypatch.setattr(_Requests, "receive", returning(nan, lambda number: number == 0))
    (group,) = generate(worker, [number], BUDGET, {number: replace(found[number], responses=before)}).values()
    assert sorted(response.discarded for response in group.responses) == [2, 2, 2, 3]


def test_two_replicas_generate_the_same_groups(undisturbed, recipe, tmp_path):
    train(recipe, tmp_path / "two", *options(rollout__workers=2), "--until", "rollout:0")
    run = RunDir.open(tmp_path / "two")
    for ours, theirs in zip(stores(run.stage(0)), stores(undisturbed.stage(0)), strict=True):
        assert (ours.group_ids, ours.chosen) == (theirs.group_ids, theirs.chosen)


MOMENTS = (  # (pattern of a file operation, which of the matching ones)
    (r"replace .*stages/000/rollouts/unfinished/.*_00000008\.arrow", 1),
    (r"replace .*stages/000/rollouts/w[^/]*\.arrow", 1),
    (r"replace .*stages/000/rollouts/SEALED", 1),  # between the seals
    (r"replace .*stages/001/rollouts/.*\.arrow", 2),
)


@pytest.mark.crash
def test_killed_runs_end_with_the_same_bytes(undisturbed, recipe, tmp_path):
    killed = tmp_path / "killed"
    for pattern, count in MOMENTS:
        kill_at(pattern, count, recipe, killed, *options())
    train(recipe, killed, *options())
    assert_same_run(undisturbed.root, killed)
    assert list(killed.glob("stages/*/rollouts/unfinished/*.arrow"))


def test_the_audit_accounts_for_every_group_and_token(undisturbed):
    found = audit(undisturbed.root, 100)
    assert (found.problems, found.notes) == ([], [])
    for row in found.stages:
        assert (row.generated, row.trained, row.not_chosen, row.pending) == (CANDIDATES, TRAINED, 0, 0)
        assert row.carried == CANDIDATES - TRAINED
    complete, cut = stores(undisturbed.stage(2))
    carried = sealed_groups(undisturbed.stage(2).rollouts, "carried")
    kept = [(cut if complete.missing([group]) else complete).read([group])[0] for group in carried]
    waiting = sum(len(response.tokens) for group in kept for response in group.responses)
    assert sum(row.tokens - row.trained_tokens for row in found.stages) == waiting


def test_unfinished_responses_are_shown(undisturbed):
    root, stored = undisturbed.root, [stores(stage)[1] for stage in undisturbed.stages()]
    cut = [response for store in stored for group in store.read(store.group_ids) for response in group.responses]
    counts = [
        list(query(root, f"select count(*) as n from {table} where finish_reason = 'unfinished'"))
        for table in ("unfinished", "responses")
    ]
    expected = sum(response.finish_reason == "unfinished" for response in cut)
    assert expected > 0 and counts == [[{"n": expected}], [{"n": 0}]]
    state = RunState(root, undisturbed.recipe)
    said = [describe_event(event, state) for event in state.poll() if event["event"] == "partial_rollouts"]
    assert said[0] == "stage 1/3 rollout chose 6 of 18 groups, carries 12 on"


@pytest.mark.parametrize(
    ("stage", "key", "change", "said"),
    [
        (0, "carried", lambda ids: ids[1:], "stage 0 does not carry on exactly"),
        (1, "carried", lambda ids: [*ids, 99], "group 99 is in no shard"),
        (2, "chosen", lambda ids: [*ids[:-1], ids[-1] + 1], "stage 2 is sealed with other groups"),
    ],
)
def test_the_audit_finds_groups_that_are_not_carried(undisturbed, tmp_path, stage, key, change, said):
    run = shutil.copytree(undisturbed.root, tmp_path / "run", symlinks=True)
    path = run / f"stages/{stage:03d}/rollouts" / SEALED
    sealed = decode(path.read_bytes())
    write_checked(path, sealed | {key: change(sealed[key])})
    problems = audit(run, 0).problems
    assert any(said in problem for problem in problems), problems


def test_unusable_token_budgets_are_refused(recipe):
    live = {"schedule__kind": "live", "schedule__sync_every": 1, "schedule__max_lag": 2}
    for changes, message in (
        ({}, "token_budget = 2, but with rollout.oversample = 1.0 .*above 1"),
        (live, "token_budget = 2 is only for .*live run schedule.partial"),
    ):
        with pytest.raises(UserError, match=message):
            check_recipe(load_recipe(recipe, options(**changes, rollout__oversample=1.0)[1::2]))
