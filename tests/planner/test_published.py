"""Recomputes every row of the table in docs/scale.md that compares estimates of the plan with published figures.

The model is Qwen3-30B-A3B. No constant is fitted to any figure; docs/scale.md lists the sources and what was assumed.
"""

import pytest

from megarl.planner import sizes
from megarl.planner.assumptions import Assumptions
from megarl.planner.simulate import Scenario, Simulation
from tests.planner.simulated import EXAMPLES, plan_of

RECIPE = "qwen3_30b_a3b/mu_grpo.toml"
DOCUMENT = (EXAMPLES.parent / "docs/scale.md").read_text()


def plan(nodes, gpu, sequence, sequences, *changes, mean=1.0):
    """The plan on nodes of 8 GPUs with ``sequences`` sequences per update.

    sequence: tokens at most, the prompt's one token included. mean: tokens on average, as a share of that.
    """
    actor = dict(tensor=1, pipeline=1, expert=8, expert_tensor=1)
    settings = [f"actor.{kind}_parallel={size}" for kind, size in actor.items()]
    settings += ["data.max_prompt_tokens=1", f"rollout.max_response_tokens={sequence - 1}"]
    settings += ["rollout.responses_per_prompt=16", f"schedule.prompts_per_update={sequences // 16}", *changes]
    assume = Assumptions(mean_prompt=1.0, mean_response=(mean * sequence - 1) / (sequence - 1))
    return plan_of(RECIPE, 8, gpu, nodes, assume, tuple(settings))


def trained(found):
    """Tokens that updates train per second and GPU."""
    tokens = found.responses_per_update * found.mean_sequence
    return tokens / found.update_seconds() / found.layout.ranks


def step(found, updates):
    """(generation, updates): seconds of a step of several updates; engines and trainers take turns on the GPUs."""
    turns = Simulation(found, Scenario(updates, updates, updates, updates - 1, handover=0.0))
    run = turns.lockstep()
    return run.generating, run.training


def model_flops(found):
    """Operations per trained token: forward and backward pass, without recompute."""
    length = found.mean_sequence
    return 3 * sizes.forward_flops(found.hf, found.active_parameters, length) / length


def in_document(name, predicted, published, digits=0):
    """Assert that the table of docs/scale.md has this row."""
    row = f"| {name} | {predicted:.{digits}f} | {published} | {predicted / published:.2f} |"
    assert row in DOCUMENT, row


def test_flops_of_a_token_are_those_of_megatron_bridge():
    """Megatron-Bridge publishes 121 TFLOP/s for 5275 tokens/s."""
    found = plan(2, "h100", 4096, 512)
    assert model_flops(found) == pytest.approx(121e12 / 5275, rel=0.02)


def test_rows_of_pretraining():
    found = plan(2, "h100", 4096, 512, "actor.recompute=none")
    in_document("Megatron-LM#5728: H100, TFLOP/s/GPU", trained(found) * model_flops(found) / 1e12, 240.5, 1)
    split = ("actor.pipeline_parallel=2", "megatron.virtual_pipeline_model_parallel_size=24", "actor.recompute=none")
    found = plan(2, "h100", 4096, 512, *split, "actor.tokens_per_micro_batch=8192")
    in_document("Megatron-Bridge 25.11: 16 H100, FP8, tokens/s/GPU", trained(found), 5275)


@pytest.mark.parametrize(("length", "published"), [(16_384, 742.8), (65_536, 1593.5)])
def test_rows_of_the_prime_rl_trainer(length, published):
    found = plan(1, "h200", length, 16, f"actor.tokens_per_micro_batch={length}")
    in_document(f"prime-rl trainer: 8 H200, {length} tokens, tokens/s/GPU", trained(found), published)


def test_rows_of_nemo_rl():
    """A step on 32 GPUs has 2048 sequences, in 4 updates, and computes log-probs of the policy before the step.

    Sequences have 3306 tokens on average and 4096 at most.
    """
    changes = ["actor.tensor_parallel=2", "rollout.tensor_parallel=4", "objective.name=decoupled_ppo"]
    changes += ["objective.aggregation=token_mean"]
    found = plan(4, "h100", 4096, 512, *changes, mean=3306 / 4096)
    seconds = sum(step(found, 4))
    in_document("NeMo-RL 0.6: 32 H100, on-policy, s a step", seconds, 192)
    in_document("NeMo-RL 0.6: 32 H100, on-policy, tokens/s/GPU", 2048 * 3306 / 32 / seconds, 1102)
    live = Simulation(found, Scenario(400, 4, 4, 7, handover=0.0)).live(4)
    seconds = (live.total - found.assume.engine_start) / 100
    in_document("NeMo-RL 0.6: 32 H100, one step off, s a step", seconds, 152)


def test_rows_of_verl():
    """A step on 128 GPUs has 8192 responses, in 4 updates, with a reference policy and old log-probs."""
    layout = ("rollout.tensor_parallel=4", "objective.name=decoupled_ppo", "objective.kl.coefficient=0.001")
    found = plan(16, "h20", 8192, 2048, *layout, mean=0.5)
    generating, training = step(found, 4)
    in_document("verl: 128 H20, generation, s", generating, 348)
    in_document("verl: 128 H20, log-probs and updates, s", training, 136)
    in_document("verl: 128 H20, s a step", generating + training, 498)
