"""Functions that plant faults in a finished run, and for each what the audit must report (`FAULTS`).

tests/storage/run_dir/test_sealed.py and tests/faults have those that a checksum shows. `rewrite` and `reseal` also
update the checksums in ledger and seal, so that only a comparison of contents can find what they change.
"""

import hashlib
import shutil
from dataclasses import replace

import numpy as np

from megarl.storage.checked_json import decode, write_checked
from megarl.storage.ledger import LEDGER, SEALED, parse, to_line
from megarl.storage.rollouts import RolloutWriter, seal
from megarl.storage.shards import Shard
from tests.helpers import read_lines
from tests.views.synthetic_run import write_lines


def change_metrics(run, change=list, values=None):
    """Write metrics.jsonl again, with ``change(records)`` as its lines, and other ``values`` {position: values}."""
    records = change(read_lines(run / "metrics.jsonl"))
    for number, others in (values or {}).items():
        records[number] |= others
    write_lines(run / "metrics.jsonl", records)


def reseal(run, stage, entries):
    """Write a ledger of these entries, and a seal that agrees with it."""
    folder = run / f"stages/{stage:03d}/rollouts"
    ledger = b"".join(map(to_line, entries))
    (folder / LEDGER).write_bytes(ledger)
    sealed = decode((folder / SEALED).read_bytes())
    sealed |= {"ledger_sha256": hashlib.sha256(ledger).hexdigest(), "groups": sum(len(e.groups) for e in entries)}
    write_checked(folder / SEALED, sealed)


def entries_of(run, stage):
    return parse(run / f"stages/{stage:03d}/rollouts/{LEDGER}")[0]


def rewrite(run, change, stage=0):
    """Write the stage's rollouts again, with ``change(groups)`` instead of the groups of the first shard."""
    folder, entries = run / f"stages/{stage:03d}/rollouts", entries_of(run, stage)
    hashes = [entry.weights_hash for entry in entries]
    shards = [[Shard.open(folder / e.shard).group(group) for group in e.groups] for e in entries]
    shards[0], one_policy = change(shards[0]), len(set(hashes)) == 1
    shutil.rmtree(folder)
    policy = hashes[0] if one_policy else None
    with RolloutWriter(folder, weights_hash=policy, logprob_mode=entries[0].logprob_mode) as writer:
        for groups, weights in zip(shards, hashes, strict=True):
            writer.append(groups, weights)
    seal(folder, sorted(group.group_id for groups in shards for group in groups), one_policy=one_policy)


def other_values_in_the_metrics(run):
    values = {1: {"reward/mean": 1.0, "response_tokens/mean": 1.0}, 3: {"staleness": 0}}
    values[7] = {"tokens": 10**6, "trained_tokens": 1}
    change_metrics(run, values=values)


def updates_in_disorder(run):
    """The first two change places, the third is there twice, the fifth and the last are missing."""
    change_metrics(run, lambda r: [r[1], r[0], r[2], r[2], r[3], *r[5:-1]])


def updates_of_another_stage(run):
    change_metrics(run, lambda r: [*r, dict(r[-1])], {2: {"stage": 1}, -1: {"update": 9}})


def rewards_change_places(run):
    """They rotate within a group, so that its mean and all metrics stay the same."""

    def rotated(group):
        first, *others = (response.reward for response in group.responses)
        moved = zip(group.responses, [*others, first], strict=True)
        return replace(group, responses=tuple(replace(response, reward=reward) for response, reward in moved))

    rewrite(run, lambda groups: list(map(rotated, groups)))


def groups_change_places(run):
    def swapped(groups):
        one, two, *others = groups
        return [replace(two, group_id=one.group_id), replace(one, group_id=two.group_id), *others]

    rewrite(run, swapped)


def responses_and_groups_that_cannot_be(run):
    def longer(response):
        tokens, logprobs = (np.resize(x, 50) for x in (response.tokens, response.rollout_logprobs))
        return replace(response, tokens=tokens, rollout_logprobs=logprobs, finish_reason="length", reward=1.0)

    def groups(before):
        first, second, *others, last = before
        first = replace(first, responses=tuple(map(longer, first.responses)))
        return [first, replace(second, responses=second.responses[:-1]), *others, replace(last, group_id=99)]

    rewrite(run, groups)
    rewrite(run, lambda before: [of_version(before[0], 0), *before[1:-1]], stage=1)


def of_version(group, version):
    return replace(group, responses=tuple(replace(r, policy_version=version) for r in group.responses))


def a_shard_is_gone_and_another_ledger_is_wrong(run):
    """It states one token too many of each shard, and another policy; all checksums agree."""
    next((run / "stages/000/rollouts").glob("*.arrow")).unlink()
    reseal(run, 1, [replace(entry, tokens=entry.tokens + 1, weights_hash="0" * 64) for entry in entries_of(run, 1)])


def the_policy_before_another_checkpoint_and_no_comparison(run):
    shutil.rmtree(run / "stages/001/policy")
    shutil.copytree(run / "stages/000/policy", run / "stages/001/policy")
    folder, events = run / "stages/001/checkpoints", run / "events.jsonl"
    (folder / "update_000002").rename(folder / "update_000003")
    write_lines(events, [event for event in read_lines(events) if event["event"] != "weight_drift"])


FAULTS = {
    other_values_in_the_metrics: (
        "update 2: reward/mean is 1.0",
        "update 2: response_tokens/mean",
        "update 4: staleness is 0",
        "update 8: tokens",
        "update 8: trained_tokens",
    ),
    updates_in_disorder: (
        "update 1 follows update 2",
        "update 3 follows update 3",
        "update 6 follows update 4",
        "stage 1 is trained, but has 2 updates",
        "of the stage, but metrics.jsonl has 2",
    ),
    updates_of_another_stage: ("stage 1 begins with update 3", "update 9 has no groups"),
    rewards_change_places: ("but its verifier says",),
    groups_change_places: ("another prompt than the data has",),
    responses_and_groups_that_cannot_be: (
        "was not scored",
        "more than rollout.max_response_tokens",
        "3 responses, not 4",
        "group 99, which belongs to another stage",
        "the schedule allows 4 to 4",
        "stage 1 is sealed with",
    ),
    a_shard_is_gone_and_another_ledger_is_wrong: (
        "is gone",
        "but its line in the ledger says",
        "was generated by weights 00000000",
    ),
    the_policy_before_another_checkpoint_and_no_comparison: (
        "has had 0 updates",
        "belongs to update 2",
        "has no weight_drift of stage 0",
    ),
}
RECOMPUTED = (rewards_change_places, groups_change_places)  # found only in prompts and rewards that are made again
