"""A response that is interrupted continues with the same random numbers."""

import numpy as np

from megarl.rollout.builtin import DRAWS, BuiltinEngine
from tests.rollout.engines import PROMPTS, generate, sampling
from tests.rollout.tiny_models import save


def test_a_continuation_in_another_block_of_random_numbers_changes_nothing(tmp_path):
    engine, length = BuiltinEngine(save(tmp_path / "policy"), 0), DRAWS + 20
    whole = generate(engine, PROMPTS, sampling(PROMPTS, 1, length))
    begun = generate(engine, PROMPTS, sampling(PROMPTS, 1, length, budget=DRAWS + 9))
    prefixes = tuple(tuple(begun[key].tokens.tolist()) for key in sorted(begun))
    assert {len(prefix) for prefix in prefixes} == {DRAWS + 9}
    for key, rest in generate(engine, PROMPTS, sampling(PROMPTS, 1, length, prefixes=prefixes)).items():
        assert [*begun[key].tokens, *rest.tokens] == whole[key].tokens.tolist()
        both = np.concatenate([begun[key].logprobs, rest.logprobs])
        np.testing.assert_allclose(both, whole[key].logprobs, rtol=0, atol=1e-5)
