"""What is particular to vLLM: a wrong reload of experts, temperatures, memory, steps. Runs after test_contract.py."""

from dataclasses import replace

import pytest

from megarl.errors import UserError
from megarl.rollout.drift import check_weights, hugging_face_reference
from tests.rollout.engines import BOTH, TOLERANCE, generate, on, other_policy, sampling, started

pytestmark = pytest.mark.vllm
VLLM = [parameter for parameter in BOTH if parameter.values[0][0] == "vllm"]
MOE = started("qwen3_moe", "vllm")


@on(MOE)
def test_temperatures_that_vllm_would_change_or_refuse(engine):
    for temperature in (0.009, 2.5):
        with pytest.raises(UserError, match=rf"temperature {temperature}: vLLM samples at 0.01 to 2.0"):
            generate(engine, [[8]], sampling([[8]], temperature=temperature))


@on(VLLM)
def test_a_wrong_reload_is_caught(engine):
    """vLLM's in-place reload of experts on a CPU is wrong without an error; only the drift check notices it."""
    engine.policy_dir = other_policy(engine)
    engine._reload()
    reference = hugging_face_reference(engine.policy_dir)
    if engine._has_experts:
        with pytest.raises(UserError, match="weights are not the policy's.* nats off"):
            check_weights(engine, reference)
    else:
        assert check_weights(engine, reference).max < TOLERANCE


@on(MOE)
def test_memory_and_steps_after_a_sleep(engine):
    """A cache too small for the memory, then so many responses that their prompts do not fit into a step together."""
    from megarl.rollout.vllm import CPU_STEP, VllmEngine

    engine.sleep()
    with pytest.raises(RuntimeError, match="call wake"):
        generate(engine, [[8]], sampling([[8]]))
    with pytest.raises(UserError, match=r"memory.*memory_fraction = 1e-09 .*groups_per_chunk.*max_response_tokens"):
        VllmEngine(engine.policy_dir, 0, replace(engine.settings, memory_fraction=1e-9))
    engine.settings = replace(engine.settings, responses=100)
    engine.wake()
    assert check_weights(engine, hugging_face_reference(engine.policy_dir)).max < TOLERANCE
    prompts = [[i % 39] * 53 for i in range(100)]
    assert len(prompts) * 53 > CPU_STEP
    assert len(generate(engine, prompts, sampling(prompts, samples=1, tokens=2))) == 100
