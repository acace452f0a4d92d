"""Sizes and times of `megarl plan`, compared with counts by hand, mostly of Qwen3-30B-A3B.

`tests/rehearsal/on_device/test_memory.py` compares activations with what a real model keeps for its backward pass,
`test_measured.py` a whole plan with a GPU.
"""

from dataclasses import replace

import numpy as np
import pytest

from megarl.actor.packing import Sample, assign_groups
from megarl.models import family_of
from megarl.models.hf_config import read_hf_config
from megarl.planner import sizes
from megarl.planner.assumptions import GIB, Assumptions
from megarl.planner.parameter_counts import StageParameters
from megarl.planner.plan import Plan
from megarl.recipe.layout import Layout
from megarl.recipe.load import load_recipe, override_recipe
from tests.actor.conftest import read_settings
from tests.planner.simulated import MOE, staged

HF = read_hf_config(MOE.parent)
RECIPE = staged()  # tensor 4, expert 8, full recompute
LAYOUT = Layout.of(RECIPE, 32)
# per rank: a quarter of embedding and head; 48 layers of fused projection (4096 + 2 x 512) / 4, output 4096 / 4,
# router and norms; final norm. 16 experts of three 2048 x 768 matrices in each layer.
DENSE = 2 * 37_984 * 2048 + 48 * (1280 * 2048 + 1024 * 2048 + 128 * 2048 + 2 * 2048 + 2 * 128) + 2048
EXPERT = 48 * 16 * 3 * 2048 * 768
COUNTS = StageParameters(48, DENSE, EXPERT)
TOTAL = 30_532_122_624
H200 = sizes.GPUS["h200"]
EVEN = Assumptions(expert_imbalance=1.0)


def plan(recipe=RECIPE, hf=HF, gpu="h200", nodes=4, layout=LAYOUT, counts=COUNTS, total=TOTAL, assume=None):
    """The plan of a recipe with these numbers of parameters, which Megatron does not count."""
    experts = 128 * 3 * 2048 * 768 * 48 if hf["num_experts"] == 128 else 0
    whole = StageParameters(hf["num_hidden_layers"], total - experts, experts)
    return Plan(recipe, hf, nodes, gpu, layout, whole, [counts] * layout.pipeline_parallel, assume or Assumptions())


def activations(*changes, **options):
    """Bytes of activations, and of the backward pass of a layer or of the log-probs."""
    items = plan(override_recipe(RECIPE, changes), assume=EVEN, **options).optimize
    return items["activations"], items["backward pass of a layer, or of log-probs"]


def test_activations_by_hand():
    """24576 tokens with tensor 4, each on one of four ranks between sublayers; inside, a rank has a part of its width.

    In elements of two bytes: inputs and outputs of two norms, and their statistics; attention of 32 heads and 4
    key-value heads of 128; 8 experts of width 768, whose rows have positions and weights, and the router.
    """
    attention = 4 * 4096 + 3 * 512 + 6 * 32
    experts = 8 * (2048 + 28 + 5 * 768) + 6 * 128
    layer, hidden = 2 * 6144 * (4 * 2048 + 4 + attention + experts), 2 * 6144 * 2048
    head = sizes.head_bytes(HF, LAYOUT, 24_576, H200)
    assert activations() == (48 * hidden + hidden, max(2 * layer, head))
    assert activations("actor.recompute=none") == (48 * layer + hidden, head)  # with the final norm's input
    normed, fed = 2 * 6144 * 2 * 2048, 2 * 6144 * experts
    assert activations('actor.recompute=["layernorm"]') == (48 * (layer - normed) + hidden, head)
    assert activations('actor.recompute=["moe"]') == (48 * (layer - fed) + hidden, head)
    # uniform keeps the input of every second layer and recomputes two at a time; block recomputes twelve, one at a time
    uniform = ("megatron.recompute_method=uniform", "megatron.recompute_num_layers=2")
    assert activations(*uniform) == (25 * hidden, max(3 * layer, head))
    block = ("megatron.recompute_method=block", "megatron.recompute_num_layers=12")
    assert activations(*block)[0] == pytest.approx(13 * hidden + 36 * layer)


def test_activations_of_pipeline_stages():
    """The first of two has two micro-batches in flight and keeps the outputs it sent; the last has the final norm."""
    layout = replace(LAYOUT, pipeline_parallel=2, expert_parallel=4)
    hidden = 6144 * 2048 * 2
    (first, _), (last, _) = (sizes.stage_bytes(HF, RECIPE, layout, i, 24576, 2 - i, 1.0) for i in (0, 1))
    assert first == 2 * 25 * hidden and last == 25 * hidden
    virtual = replace(layout, virtual_stages=2)
    assert sizes.stage_bytes(HF, RECIPE, virtual, 1, 24576, 2, 1.0)[0] == 2 * 25 * hidden + hidden
    four = replace(LAYOUT, pipeline_parallel=4)
    assert [sizes.micro_batches_in_flight(four, stage, 100) for stage in range(4)] == [4, 3, 2, 1]
    assert [sizes.micro_batches_in_flight(four, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    # two chunks a rank: Megatron warms up 2 (p - stage - 1) + (v - 1) p chunks and starts one more
    assert sizes.micro_batches_in_flight(virtual, 0, 100) == 5 / 2


def test_recomputed_parts_cost_their_share_of_a_forward_pass():
    """With core_attn the operations of attention are repeated; with method block, those of twelve layers."""

    def seconds(*changes):
        return plan(override_recipe(RECIPE, changes)).update_seconds()

    length, plain = plan().mean_sequence, seconds("actor.recompute=none")
    attention = 48 * 2 * 4096 * length**2 / sizes.forward_flops(HF, plan().active_parameters, length)
    assert seconds('actor.recompute=["core_attn"]') == pytest.approx(plain * (3 + attention) / 3)
    block = seconds("megatron.recompute_method=block", "megatron.recompute_num_layers=12")
    assert block == pytest.approx(plain * (3 + 12 / 48) / 3)


@pytest.mark.parametrize(("prompt", "response", "budget", "replicas"), [(64, 16, 512, 2), (512, 1536, 16384, 4)])
def test_an_update_computes_the_tokens_of_its_packing(prompt, response, budget, replicas):
    """32 prompts with 8 responses each; a packed prompt has no last token."""
    lengths = [f"data.max_prompt_tokens={prompt + 1}", f"rollout.max_response_tokens={response}"]
    recipe = override_recipe(RECIPE, [*lengths, f"actor.tokens_per_micro_batch={budget}"])
    others = dict(layout=Layout(replicas), assume=Assumptions(mean_prompt=1.0, mean_response=1.0))
    found, whole = plan(recipe, **others), plan(override_recipe(recipe, ["actor.layers=transformer_engine"]), **others)
    columns = np.arange(response), np.zeros(response, np.float32), 1.0
    samples = [Sample(np.full(prompt + 1, n), *columns) for n in range(32) for _ in range(8)]
    bins = [bin for each in assign_groups(samples, replicas, budget, 1, share=True) for bin in each]
    packed = sum(prompt * len({i // 8 for i in bin}) + response * len(bin) for bin in bins)
    assert found.tokens_per_update == pytest.approx(packed, rel=1 / 32)
    assert whole.tokens_per_update == 256 * (prompt + 1 + response)
    short, one = (sizes.forward_flops(HF, found.active_parameters, n) for n in (prompt + 1, prompt + 1 + response))
    seconds = found.update_seconds(), whole.update_seconds()
    assert seconds[0] / seconds[1] == pytest.approx(1 - found.prompts_saved * short / (256 * one))


def test_the_pipeline_stage_with_the_most_layers_sets_the_pace():
    """61 layers are divided into stages of 6, six times 8, and 7; 64 layers into eight of 8."""
    eight, seconds, one = replace(LAYOUT, ranks=256, pipeline_parallel=8), [], []
    for layers, layout in ((64, eight), (61, replace(eight, first_layers=6, last_layers=7))):
        recipe = override_recipe(RECIPE, ["actor.layers=transformer_engine"])  # every response has its prompt
        each = plan(recipe, hf=HF | {"num_hidden_layers": layers}, layout=layout)
        seconds.append(each.update_seconds())
        one.append(sizes.forward_flops(each.hf, each.active_parameters, each.mean_sequence))
    assert seconds[1] / seconds[0] == pytest.approx(one[1] / one[0] * 8 * 8 / 61)


def test_layers_with_a_state(tmp_path):
    """Qwen3-Next of four layers, two of them with a state: 2 key heads of 8, 4 value heads of 12, convolutions of 4."""
    hf = read_settings(tmp_path, "qwen3_next", num_hidden_layers=4)
    family = family_of(hf)
    assert family.cached_elements(hf, 1) == 2 * (2 * 2 * 16)  # two layers, keys and values of two heads
    states = 2 * (4 * 8 * 12 + 3 * (2 * 2 * 8 + 4 * 12))  # state, and the convolution's last inputs
    assert family.state_elements(hf, 1) == states and family.state_elements(hf, 2) == states / 2
    assert family_of(HF).state_elements(HF, 1) == 0
    assert sizes.forward_flops(hf, 1000, 100) == 2 * 1000 * 100 + 2 * (2 * 4 * 16 * 100**2)
    # a response takes its state and its tokens from the memory for the cache
    small = plan(hf=hf, total=10**9)
    room, fit = small.rollout["KV cache"], small.responses_that_fit(50)
    tensor = RECIPE.rollout.tensor_parallel
    assert fit == room / 2 / (50 * family.cached_elements(hf, tensor) + family.state_elements(hf, tensor))


def test_layers_with_windows(tmp_path):
    """gpt-oss of four layers, two of them with a window of 6 tokens: 4 heads and 2 key-value heads of 16."""
    hf = read_settings(tmp_path, "gpt_oss", num_hidden_layers=4)
    cached = 2 * 2 * 16  # of a token and layer, keys and values
    family = family_of(hf)
    assert family.cached_elements(hf, 1) == 2 * cached
    assert family.state_elements(hf, 1) == 2 * 6 * cached and family.state_elements(hf, 2) == 6 * cached


def test_candidates_of_dynamic_sampling_take_time_and_disk():
    twice = override_recipe(RECIPE, ["rollout.oversample=2"])
    partial = override_recipe(twice, ["rollout.token_budget=1024"])
    one, two, budget = (plan(r).rollout_seconds for r in (RECIPE, twice, partial))
    assert two == pytest.approx(2 * one) and budget == pytest.approx(one)
    disks = [plan(r).disk["rollouts of a stage"] for r in (RECIPE, twice, partial)]
    assert disks[1] == 2 * disks[0] and disks[1] == disks[2]


def test_files_by_hand():
    full = Assumptions(mean_prompt=1.0, mean_response=1.0)
    response = (2048 + 20480) * 4 + 20480 * 4
    responses = 48 * 32 * 8
    expected = {"rollouts of a stage": responses * response, "one checkpoint": 14 * TOTAL, "one policy": 2 * TOTAL}
    assert plan(assume=full).disk == expected
    experts = responses * (2048 + 20480) * 48 * 8  # a byte for each of 128 experts
    replayed = plan(override_recipe(RECIPE, ["actor.routing_replay=engine"]), assume=full).disk
    assert replayed["rollouts of a stage"] == expected["rollouts of a stage"] + experts


def test_keys_and_values_of_an_engine():
    """Of 48 layers, where a head is never split; for the rest see `running` below."""
    assert [family_of(HF).cached_elements(HF, tensor) for tensor in (1, 2, 8)] == [2 * 48 * 128 * n for n in (4, 2, 1)]


def test_responses_that_decode_together():
    """The least of what the KV cache holds at mean length, the engine's limit, and the replica's share of responses."""

    def running(nodes, *changes):
        return plan(override_recipe(RECIPE, changes), nodes=nodes).running_responses

    cache = 0.92 * 139.8 * GIB - 30_532_122_624 - 6 * GIB
    assert running(1) == pytest.approx(cache / (49_152 * (2048 / 4 + 20480 / 2 / 2)))
    assert running(1, "rollout.groups_per_chunk=8") == 8 * 8
    short = "rollout.max_response_tokens=2048"
    assert running(1, short) == 128 * 8
    assert running(4, short) == 48 * 32 * 8 / 16  # 16 replicas
    # a limit below what fits makes decoding slower
    few, all_that_fit = (
        plan(override_recipe(RECIPE, c), nodes=1).rollout_seconds for c in (["rollout.groups_per_chunk=8"], [])
    )
    assert few > 1.5 * all_that_fit


def test_a_version_of_a_live_run_generates_what_its_schedule_allows():
    """With MinPRO's delay a version generates for 16 updates; without a delay it may generate until max_lag."""
    live, replicas = load_recipe(MOE), 16
    free = override_recipe(live, ["schedule.delay=0", "schedule.max_lag=63"])
    long = override_recipe(free, ["schedule.max_lag=1000"])  # all of the stage
    for recipe, updates in ((live, 16), (RECIPE, 48), (free, 64), (long, 160)):
        assert plan(recipe).responses_of_version == updates * 32 * 8 / replicas
    many = ["rollout.memory_fraction=0.9", "rollout.groups_per_chunk=128"]
    few = override_recipe(live, ["rollout.max_response_tokens=64", *many])
    assert plan(few).running_responses == 16 * 32 * 8 / 16  # 16 replicas
