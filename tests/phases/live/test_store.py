"""The rollout store of a live stage: several policies, and responses of several versions."""

from dataclasses import replace

import numpy as np
import pytest

from megarl.errors import UserError
from megarl.storage.rollouts import Group, Response, RolloutStore, RolloutWriter, seal
from tests.storage.sample_rollouts import POLICY, as_bytes, make_group


def continued(group_id, versions):
    """A group with one response whose tokens have these policy versions, and one of a single version."""
    n = len(versions)
    tokens, logprobs = np.arange(n, dtype=np.int32), np.linspace(-2, -1, n, dtype=np.float32)
    spans = Response(tokens, logprobs, 1.0, "stop", versions[0], np.array(versions, np.int32))
    plain = Response(tokens, logprobs, 0.0, "length", 4)
    return Group(group_id, np.array([3], np.int32), (spans, plain))


def live_writer(directory, writer=0):
    return RolloutWriter(directory, weights_hash=None, logprob_mode="processed", writer=writer)


def test_versions_of_tokens_are_stored(tmp_path):
    with live_writer(tmp_path) as writer:
        writer.append([continued(0, [0, 0, 4, 8, 8])], "a" * 64)
        writer.append([make_group(1)], "b" * 64)  # in a shard without the column policy_versions
    store = RolloutStore(tmp_path, one_policy=False)
    spans, plain = store.read([0])[0].responses
    assert spans.versions.tolist() == [0, 0, 4, 8, 8]
    assert (spans.policy_version, plain.policy_version) == (0, 4)
    assert plain.policy_versions is None
    assert plain.versions.tolist() == [4] * 5
    assert as_bytes(store.read([1])[0]) == as_bytes(make_group(1))
    assert [entry.weights_hash[0] for entry in store.entries] == ["a", "b"]
    for opens in (RolloutStore, lambda path: RolloutWriter(path, **POLICY)):  # as if the stage were not live
        with pytest.raises(UserError, match="one behaviour policy"):
            opens(tmp_path)

    with pytest.raises(UserError, match="one behaviour policy"):
        seal(tmp_path, range(2))
    seal(tmp_path, range(2), one_policy=False)
    assert RolloutStore(tmp_path, one_policy=False).group_ids == [0, 1]


def test_wrong_versions_are_refused(tmp_path):
    group = continued(0, [0, 4])
    with live_writer(tmp_path) as writer:
        for versions, first in ((np.array([0], np.int32), 0), (np.array([0, 4]), 0), (np.array([0, 4], np.int32), 1)):
            wrong = replace(group.responses[0], policy_version=first, policy_versions=versions)
            with pytest.raises(UserError, match="policy_versions must be int32"):
                writer.append([replace(group, responses=(wrong,))], "a" * 64)
