"""Functions that plant a fault in a finished run, and for each a part of what the audit must report (`FAULTS`).

`rewrite` and `reseal` also update the checksums in ledger and seal, so that only a comparison of contents can find what
they change.
"""

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np

from megarl.storage.checked_json import append_json, decode, write_checked
from megarl.storage.ledger import LEDGER, SEALED, LedgerEntry, parse, to_line
from megarl.storage.shards import Shard, encode


def lines(run):
    return (run / "metrics.jsonl").read_text().splitlines(keepends=True)


def write_lines(run, text):
    (run / "metrics.jsonl").write_text("".join(text))


def change_line(run, number, **values):
    text = lines(run)
    text[number] = json.dumps(json.loads(text[number]) | values) + "\n"
    write_lines(run, text)


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
    """Replace the groups of the stage's first shard by ``change(groups)``, in shard, ledger and seal."""
    first, *others = entries_of(run, stage)
    path = run / f"stages/{stage:03d}/rollouts" / first.shard
    shard = Shard.open(path)
    groups = change([shard.group(group) for group in first.groups])
    payload = encode(groups, first.weights_hash, first.logprob_mode)
    path.unlink()
    path.write_bytes(payload)
    responses = [response for group in groups for response in group.responses]
    new = LedgerEntry(
        first.shard,
        tuple(group.group_id for group in groups),
        len(responses),
        sum(len(r.tokens) for r in responses),
        float(sum(r.reward for r in responses)),
        payload.size,
        hashlib.sha256(payload).hexdigest(),
        first.weights_hash,
        first.logprob_mode,
    )
    reseal(run, stage, [new, *others])


def change_responses(run, change, stage=0):
    """Replace each response of the first shard's first group by ``change(response)``."""

    def groups(before):
        first, *others = before
        return [replace(first, responses=tuple(map(change, first.responses))), *others]

    rewrite(run, groups, stage)


def an_update_twice(run):
    text = lines(run)
    write_lines(run, [*text[:3], text[2], *text[3:]])


def an_update_is_missing(run):
    write_lines(run, [line for number, line in enumerate(lines(run)) if number != 4])


def two_updates_in_the_wrong_order(run):
    text = lines(run)
    write_lines(run, [text[1], text[0], *text[2:]])


def the_last_updates_are_missing(run):
    write_lines(run, lines(run)[:-2])


def no_metrics(run):
    write_lines(run, [])


def a_line_is_torn(run):
    text = lines(run)
    text[5] = text[5][:40] + "\n"
    write_lines(run, text)


def an_update_of_another_stage(run):
    change_line(run, 2, stage=1)


def an_update_too_many(run):
    write_lines(run, [*lines(run), lines(run)[-1]])
    change_line(run, -1, update=9)


def a_better_reward_in_the_metrics(run):
    change_line(run, 1, **{"reward/mean": 1.0})


def other_lengths_in_the_metrics(run):
    change_line(run, 1, **{"response_tokens/mean": 1.0})


def more_tokens_in_the_metrics(run):
    change_line(run, 7, tokens=10**6)


def fewer_trained_tokens_in_the_metrics(run):
    change_line(run, 7, trained_tokens=1)


def fresher_data_in_the_metrics(run):
    change_line(run, 3, staleness=0)


def a_wrong_reward(run):
    change_responses(run, lambda response: replace(response, reward=1 - response.reward))


def rewards_change_places(run):
    """They rotate within a group, so that its mean and all metrics stay the same."""

    def groups(before):
        at = next(i for i, g in enumerate(before) if len({r.reward for r in g.responses}) > 1)
        rewards = [response.reward for response in before[at].responses]
        moved = [replace(r, reward=x) for r, x in zip(before[at].responses, rewards[1:] + rewards[:1], strict=True)]
        return [*before[:at], replace(before[at], responses=tuple(moved)), *before[at + 1 :]]

    rewrite(run, groups)


def a_reward_for_a_response_that_was_cut_off(run):
    change_responses(run, lambda response: replace(response, finish_reason="length", reward=1.0))


def the_log_probs_of_another_policy(run):
    def less_certain(response):
        return replace(response, rollout_logprobs=response.rollout_logprobs * np.float32(1.01))

    rewrite(run, lambda groups: [replace(g, responses=tuple(map(less_certain, g.responses))) for g in groups])


def an_older_policy_version(run):
    change_responses(run, lambda response: replace(response, policy_version=0), stage=1)


def another_policys_hash(run):
    entries = entries_of(run, 1)
    reseal(run, 1, [replace(entry, weights_hash="0" * 64) for entry in entries])


def a_group_is_missing(run):
    rewrite(run, lambda groups: groups[:-1])


def a_response_is_missing(run):
    rewrite(run, lambda groups: [replace(groups[0], responses=groups[0].responses[:-1]), *groups[1:]])


def two_groups_change_places(run):
    def groups(before):
        one, two, *others = before
        return [replace(one, group_id=two.group_id), replace(two, group_id=one.group_id), *others]

    rewrite(run, lambda before: sorted(groups(before), key=lambda group: group.group_id))


def a_group_of_another_stage(run):
    rewrite(run, lambda groups: [*groups[:-1], replace(groups[-1], group_id=99)])


def a_longer_response(run):
    def longer(response):
        return replace(
            response, tokens=np.resize(response.tokens, 50), rollout_logprobs=np.resize(response.rollout_logprobs, 50)
        )

    change_responses(run, longer)


def a_shard_of_the_other_stage(run):
    first, other = (run / f"stages/{stage:03d}/rollouts" for stage in (0, 1))
    shutil.copy(next(iter(sorted(other.glob("*.arrow")))), next(iter(sorted(first.glob("*.arrow")))))


def a_shard_is_gone(run):
    next((run / "stages/000/rollouts").glob("*.arrow")).unlink()


def a_bit_of_a_shard(run):
    flip(next((run / "stages/001/rollouts").glob("*.arrow")))


def a_line_of_the_ledger_is_gone(run):
    path = run / "stages/000/rollouts" / LEDGER
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def another_line_in_the_ledger(run):
    """A shard's entry states one token too many; the entry's own checksum and the seal agree with it."""
    first, *others = entries_of(run, 0)
    reseal(run, 0, [replace(first, tokens=first.tokens + 1), *others])


def a_bit_of_a_policy(run):
    flip(run / "stages/001/policy/model.safetensors")


def the_policy_before(run):
    shutil.rmtree(run / "stages/001/policy")
    shutil.copytree(run / "stages/000/policy", run / "stages/001/policy")


def a_policy_is_gone(run):
    shutil.rmtree(run / "stages/000/policy")


def another_tokenizer(run):
    path = run / "final/tokenizer_config.json"
    path.write_text(path.read_text() + " ")


def a_bit_of_a_checkpoint(run):
    flip(next((run / "stages/000/checkpoints").glob("*/*.distcp")))


def a_checkpoint_of_another_update(run):
    folder = run / "stages/000/checkpoints"
    (folder / "update_000002").rename(folder / "update_000003")


def a_file_too_many_in_a_checkpoint(run):
    next((run / "stages/000/checkpoints").glob("update_*")).joinpath("more.pt").write_bytes(b"")


def engines_that_nobody_compared(run):
    events = [line for line in (run / "events.jsonl").read_text().splitlines() if '"weight_drift"' not in line]
    (run / "events.jsonl").write_text("".join(f"{line}\n" for line in events))
    append_json(run / "events.jsonl", {"time": 0, "event": "phase_end"})


def another_recipe(run):
    path = run / "recipe.toml"
    path.write_text(path.read_text().replace("max_response_tokens = 6", "max_response_tokens = 7"))


def other_prompts(run):
    """Changes the checksums that the run recorded, not the prompt files, which other tests use too."""
    files = decode((run / "prompts.json").read_bytes())["files"]
    write_checked(run / "prompts.json", {"files": dict.fromkeys(files, "0" * 64)})


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.unlink()
    path.write_bytes(data)


FAULTS = {
    an_update_twice: "update 3 follows update 3",
    an_update_is_missing: "update 6 follows update 4",
    two_updates_in_the_wrong_order: "update 1 follows update 2",
    the_last_updates_are_missing: "stage 1 is trained, but has 2 updates",
    no_metrics: "metrics.jsonl has 0",
    a_line_is_torn: "metrics.jsonl, line 6 is damaged",
    an_update_of_another_stage: "stage 1 begins with update 3",
    an_update_too_many: "update 9 has no groups",
    a_better_reward_in_the_metrics: "update 2: reward/mean is 1.0",
    other_lengths_in_the_metrics: "update 2: response_tokens/mean",
    more_tokens_in_the_metrics: "update 8: tokens",
    fewer_trained_tokens_in_the_metrics: "update 8: trained_tokens",
    fresher_data_in_the_metrics: "update 4: staleness is 0",
    a_wrong_reward: "but its verifier says",
    rewards_change_places: "but its verifier says",
    a_reward_for_a_response_that_was_cut_off: "was not scored",
    the_log_probs_of_another_policy: "log-probs of stage 0 are not its policy's",
    an_older_policy_version: "the schedule allows 4 to 4",
    another_policys_hash: "was generated by weights 000000000000",
    a_group_is_missing: "sealed with",
    a_response_is_missing: "3 responses, not 4",
    two_groups_change_places: "another prompt than the data has",
    a_group_of_another_stage: "group 99, which belongs to another stage",
    a_longer_response: "more than rollout.max_response_tokens",
    a_shard_of_the_other_stage: "the shard",
    a_shard_is_gone: "is gone",
    a_bit_of_a_shard: "does not match the checksum",
    a_line_of_the_ledger_is_gone: "does not agree with",
    another_line_in_the_ledger: "but its line in the ledger says",
    a_bit_of_a_policy: "do not match their checksum",
    the_policy_before: "has had 0 updates",
    a_policy_is_gone: "is gone, but stage",
    another_tokenizer: "tokenizer_config.json does not match",
    a_bit_of_a_checkpoint: "does not match its checksum",
    a_checkpoint_of_another_update: "belongs to update 2",
    a_file_too_many_in_a_checkpoint: "more.pt is not in its manifest",
    engines_that_nobody_compared: "has no weight_drift of stage 0",
    another_recipe: "was changed after the run began",
    other_prompts: "has changed since",
}
