"""A tiny run that chooses among its candidates, against one that generates them all; killed, it chooses the same."""

import itertools
import json
import os
import shutil
import signal
import time

import pytest

from megarl.recipe.load import load_recipe
from megarl.storage.ledger import parse
from megarl.storage.policies import copy_policy
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from tests.helpers import RECIPE
from tests.live.conftest import events, metrics, phases  # noqa: F401 - a fixture
from tests.storage.sample_rollouts import as_bytes

GROUPS, CHUNK = 6, 2
SETTINGS = {
    "rollout.max_response_tokens": 1,  # one letter: a hopeful prompt's answer comes about once in the vocabulary's size
    "rollout.responses_per_prompt": 24,
    "rollout.groups_per_chunk": CHUNK,
    "reward.require_stop": False,
    "schedule.updates_per_stage": 3,
    "schedule.prompts_per_update": 2,
    "eval.every": 0,
}
CANDIDATES = 60


@pytest.fixture(scope="module")
def new_run(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dynamic_sampling")
    path, prompts = directory / "recipe.toml", directory / "prompts.jsonl"
    words = ["".join(letters) for letters in itertools.product("abcde", repeat=3)]
    # no response of one letter is "never": three in five prompts are hopeless
    answers = {word: word[0] if word[0] in "ab" else "never" for word in words}
    prompts.write_text("".join(json.dumps({"prompt": word, "answer": answers[word]}) + "\n" for word in words))
    path.write_text(RECIPE.format(model=tiny_model, prompts=prompts))

    def make(name, **settings):
        settings = SETTINGS | {key.replace("__", "."): value for key, value in settings.items()}
        recipe = load_recipe(path, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
        run = RunDir.create(directory / name, recipe)
        copy_policy(recipe.model.path, recipe.model.tokenizer_path, run.stage(0).policy)
        return run

    return make


@pytest.fixture(scope="module")
def everything(new_run, phases):  # noqa: F811
    """All candidates of the first stage."""
    run = new_run("everything", schedule__updates_per_stage=CANDIDATES // 2)
    phases(run, "rollout")
    return RolloutStore(run.stage(0).rollouts).read(range(CANDIDATES))


@pytest.fixture(scope="module")
def chosen(everything):
    """The first with variance, by hand."""
    with_variance = [g.group_id for g in everything if len({r.reward for r in g.responses}) > 1]
    assert len(with_variance) > GROUPS, "the test needs prompts that are right now and then"
    return with_variance[:GROUPS]


@pytest.fixture(scope="module")
def undisturbed(new_run, phases):  # noqa: F811
    run = new_run("undisturbed", rollout__oversample=10)
    for stage in range(2):
        phases(run, "rollout", stage)
        phases(run, "optimize", stage)
    return run


def contents(run, stage=0):
    return {path.name: path.read_bytes() for path in run.stage(stage).rollouts.iterdir()}


def test_all_that_is_trained_has_variance(undisturbed, everything, chosen):
    store = RolloutStore(undisturbed.stage(0).rollouts)
    assert store.chosen == chosen
    assert [as_bytes(g) for g in store.read(chosen)] == [as_bytes(everything[i]) for i in chosen]
    updates = metrics(undisturbed)
    assert [update["update"] for update in updates] == list(range(1, 7))
    assert all(update["zero_variance_fraction"] == 0 for update in updates)
    for update, first in zip(updates[:3], range(0, GROUPS, 2), strict=True):
        rewards = [response.reward for group in chosen[first : first + 2] for response in everything[group].responses]
        assert update["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_generation_ends_as_soon_as_there_are_enough(undisturbed, everything, chosen):
    generated = (chosen[-1] // CHUNK + 1) * CHUNK
    assert generated < CANDIDATES
    assert RolloutStore(undisturbed.stage(0).rollouts).group_ids == list(range(generated))
    with_variance = sum(len({r.reward for r in g.responses}) > 1 for g in everything[:generated])
    event = events(undisturbed, "dynamic_sampling")[0]
    del event["crc"]
    assert event | {"time": 0} == {
        "time": 0, "event": "dynamic_sampling", "phase": "rollout", "stage": 0, "candidates": CANDIDATES,
        "generated": generated, "with_variance": with_variance, "chosen": GROUPS, "filled": 0,
    }  # fmt: skip


def test_no_prompt_of_a_later_stage_was_a_candidate_before(undisturbed):
    later = RolloutStore(undisturbed.stage(1).rollouts)
    assert undisturbed.stage(1).groups == range(CANDIDATES, 2 * CANDIDATES)
    assert set(later.chosen) <= set(later.group_ids) <= set(undisturbed.stage(1).groups)
    assert len(later.chosen) == GROUPS


def test_too_few_are_filled_and_it_is_said(new_run, phases, everything):  # noqa: F811
    run = new_run("too_few", rollout__oversample=4)
    phases(run, "rollout")
    store = RolloutStore(run.stage(0).rollouts)
    assert store.group_ids == list(range(24))
    with_variance = [g.group_id for g in everything[:24] if len({r.reward for r in g.responses}) > 1]
    assert 0 < len(with_variance) < GROUPS
    others = [i for i in range(24) if i not in with_variance]
    assert store.chosen == sorted(with_variance + others[: GROUPS - len(with_variance)])
    (event,) = events(run, "dynamic_sampling")
    assert (event["generated"], event["filled"]) == (24, GROUPS - len(with_variance))


def kill_at_a_shard(phases, run, count):  # noqa: F811
    pids = phases.start(run, "rollout")
    deadline = time.monotonic() + 120
    while len(list(run.stage(0).rollouts.glob("*.arrow"))) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(pids[-1], signal.SIGKILL)
    assert any(phases.wait()) and not run.stage(0).is_sealed(), "the phase ended before it was killed"


def test_a_killed_run_is_the_undisturbed_one(undisturbed, new_run, phases):  # noqa: F811
    run = new_run("killed", rollout__oversample=10)
    kill_at_a_shard(phases, run, 1)
    kill_at_a_shard(phases, run, 10)
    phases(run, "rollout")
    phases(run, "optimize")
    assert contents(run) == contents(undisturbed)
    final = "model.safetensors"
    assert (run.stage(1).policy / final).read_bytes() == (undisturbed.stage(1).policy / final).read_bytes()


def test_replicas_of_which_one_is_killed_choose_the_same(new_run, phases, chosen):  # noqa: F811
    run = new_run("replicas", rollout__oversample=10, rollout__workers=2)
    kill_at_a_shard(phases, run, 2)
    phases(run, "rollout")
    assert RolloutStore(run.stage(0).rollouts).chosen == chosen


def test_what_is_missing_below_a_chosen_group_is_generated(undisturbed, new_run, phases):  # noqa: F811
    """As when the replica that had the second chunk died, and the others went on to the end."""
    run = new_run("gap", rollout__oversample=10)
    shutil.copytree(undisturbed.stage(0).rollouts, run.stage(0).rollouts)
    (run.stage(0).rollouts / "SEALED").unlink()
    entries, _ = parse(run.stage(0).rollouts / "ledger.jsonl")
    lines = (run.stage(0).rollouts / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run.stage(0).rollouts / entries[1].shard).unlink()
    (run.stage(0).rollouts / "ledger.jsonl").write_bytes(b"".join(lines[:1] + lines[2:]))
    phases(run, "rollout")
    assert contents(run) == contents(undisturbed)
