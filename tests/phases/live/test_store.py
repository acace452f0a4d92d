"""The rollout store of a live stage: several policies, and responses of several versions."""

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


def live_writer(directory):
    return RolloutWriter(directory, weights_hash=None, logprob_mode="processed")


def test_versions_of_tokens_are_stored(tmp_path):
    with live_writer(tmp_path) as writer:
        writer.append([continued(0, [0, 0, 4, 8, 8])], "a" * 64)
        writer.append([make_group(1)], "b" * 64)  # in a shard without the column policy_versions
    store = RolloutStore(tmp_path, one_policy=False)
    assert as_bytes(store.read([0])[0]) == as_bytes(continued(0, [0, 0, 4, 8, 8]))
    assert as_bytes(store.read([1])[0]) == as_bytes(make_group(1))
    assert store.read([0])[0].responses[1].versions.tolist() == [4] * 5
    for opens in (RolloutStore, lambda path: RolloutWriter(path, **POLICY), lambda path: seal(path, range(2))):
        with pytest.raises(UserError, match="one behaviour policy"):  # as if the stage were not live
            opens(tmp_path)
    seal(tmp_path, range(2), one_policy=False)


def test_wrong_versions_are_refused(tmp_path):
    with live_writer(tmp_path) as writer:
        group = continued(0, [0, 4])
        for versions, first in ((np.array([0], np.int32), 0), (np.array([0, 4]), 0), (np.array([0, 4], np.int32), 1)):
            wrong = Response(
                np.arange(2, dtype=np.int32), group.responses[0].rollout_logprobs, 1.0, "stop", first, versions
            )
            with pytest.raises(UserError, match="policy_versions must be int32"):
                writer.append([Group(0, group.prompt_tokens, (wrong,))], "a" * 64)
