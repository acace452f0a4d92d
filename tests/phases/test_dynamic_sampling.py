"""Dynamic sampling in a tiny run, compared with one that generates all candidates; a killed run chooses the same."""

import itertools
import re
import shutil

import numpy as np
import pytest

from megarl.storage.ledger import parse
from megarl.storage.rollouts import RolloutStore
from megarl.views.audit import audit
from tests.helpers import events, metrics, write_recipe
from tests.phases.commands import succeed
from tests.phases.live.conftest import go_on, make_run
from tests.phases.test_kill import kill_at
from tests.storage.sample_rollouts import as_bytes, contents

GROUPS, CHUNK = 6, 2
SETTINGS = {
    "rollout__max_response_tokens": 1,  # one letter: a solvable prompt is solved now and then
    "rollout__responses_per_prompt": 24,
    "rollout__groups_per_chunk": CHUNK,
    "reward__require_stop": False,
    "updates_per_stage": 3,
    "prompts_per_update": 2,
}
CANDIDATES = 60


@pytest.fixture(scope="module")
def new_run(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dynamic_sampling")
    recipe = write_recipe(directory, tiny_model, ["".join(letters) for letters in itertools.product("abcde", repeat=3)])
    # no response of one letter is "never", so three of five prompts are never solved
    prompts = directory / "prompts.jsonl"
    prompts.write_text(re.sub('"answer": "[cde]"', '"answer": "never"', prompts.read_text()))
    return lambda name, **settings: make_run(directory / name, recipe, SETTINGS | settings)


@pytest.fixture(scope="module")
def all_candidates(new_run):
    """All candidates of the first stage, generated without dynamic sampling."""
    run = new_run("everything", updates_per_stage=CANDIDATES // 2)
    succeed("rollout", run.root, "--stage", 0)
    return RolloutStore(run.stage(0).rollouts).read(range(CANDIDATES))


@pytest.fixture(scope="module")
def undisturbed(new_run):
    run = new_run("undisturbed", rollout__oversample=10)
    go_on(run)
    return run


def test_a_stage_generates_until_enough_groups_have_variance_and_trains_only_these(undisturbed, all_candidates):
    with_variance = [g.group_id for g in all_candidates if len({r.reward for r in g.responses}) > 1]
    chosen = with_variance[:GROUPS]  # found by a plain search
    generated = (chosen[-1] // CHUNK + 1) * CHUNK
    store = RolloutStore(undisturbed.stage(0).rollouts)
    assert store.chosen == chosen
    assert [as_bytes(g) for g in store.read(chosen)] == [as_bytes(all_candidates[i]) for i in chosen]
    assert generated < CANDIDATES and store.group_ids == list(range(generated))
    updates = metrics(undisturbed)
    assert [update["update"] for update in updates] == list(range(1, 7))
    assert all(update["zero_variance_fraction"] == 0 for update in updates)
    rewards = np.array([[response.reward for response in all_candidates[group].responses] for group in chosen])
    assert [update["reward/mean"] for update in updates[:3]] == pytest.approx(rewards.reshape(3, -1).mean(1))
    counts = {"candidates": CANDIDATES, "generated": generated, "chosen": GROUPS, "filled": 0}
    counts["with_variance"] = sum(group < generated for group in with_variance)
    assert events(undisturbed, "dynamic_sampling")[0].items() >= counts.items()
    later = RolloutStore(undisturbed.stage(1).rollouts)
    assert set(later.group_ids) <= set(range(CANDIDATES, 2 * CANDIDATES)) and len(later.chosen) == GROUPS


def test_a_missing_chunk_below_a_chosen_group_is_generated(undisturbed, new_run):
    """The store is left as if the replica with the second chunk had died and the others had generated all theirs."""
    run, whole = new_run("gap", rollout__oversample=10), contents(undisturbed.stage(0).rollouts)
    rollouts = shutil.copytree(undisturbed.stage(0).rollouts, run.stage(0).rollouts)
    (rollouts / "SEALED").unlink()
    (rollouts / parse(rollouts / "ledger.jsonl")[0][1].shard).unlink()
    lines = whole["ledger.jsonl"].splitlines(keepends=True)
    (rollouts / "ledger.jsonl").write_bytes(b"".join(lines[:1] + lines[2:]))
    succeed("rollout", run.root, "--stage", 0)
    assert contents(rollouts) == whole


LIVE = {"kind": "live", "stages": 1, "updates_per_stage": 6, "sync_every": 3}
LIVE |= {"rollout__oversample": 10, "actor__checkpoint_every": 2}


def test_a_live_run_chooses_for_each_version_as_a_staged_run_does(undisturbed, new_run):
    """Its two versions generate what the two stages of the staged run have, and the same updates follow."""
    # of three updates the last one must not be more than 4 after the version, so the version is that before them
    run = new_run("live", **LIVE, max_lag=4, colocate=True)
    go_on(run)
    check_equal_to_staged(run, undisturbed)
    (event,) = events(run, "dynamic_sampling")
    staged = events(undisturbed, "dynamic_sampling")
    for name in ("candidates", "generated", "with_variance", "chosen", "filled"):
        assert event[name] == sum(one[name] for one in staged)


def check_equal_to_staged(run, staged):
    store = RolloutStore(run.stage(0).rollouts, one_policy=False)
    theirs = [RolloutStore(staged.stage(stage).rollouts) for stage in range(2)]
    assert store.chosen == [group for one in theirs for group in one.chosen]
    assert [as_bytes(g) for g in store.read(store.chosen)] == [as_bytes(g) for s in theirs for g in s.read(s.chosen)]
    assert all(update["zero_variance_fraction"] == 0 for update in metrics(run))
    assert [update["staleness"] for update in metrics(run)] == [0, 1, 2] * 2
    final = "model.safetensors"
    assert (run.final / final).read_bytes() == (staged.stage(2).policy / final).read_bytes()


@pytest.mark.crash
def test_a_killed_live_run_ends_as_if_it_had_not_been(undisturbed, new_run):
    run = new_run("killed live", rollout__workers=2, **LIVE, lockstep=True)
    kill_at(r"replace .*\.arrow", 10, run.root / "recipe.toml", run.root)
    assert not run.stage(0).is_sealed()
    go_on(run)
    check_equal_to_staged(run, undisturbed)
    assert audit(run.root, 1000).problems == []
