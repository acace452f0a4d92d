"""`megarl simulate`, compared with closed forms, `megarl plan`, and tables 1 and 2 of mu-GRPO."""

from dataclasses import replace

import numpy as np
import pytest

from megarl.cli import main
from megarl.errors import UserError
from megarl.planner.assumptions import Assumptions
from megarl.planner.simulate import Scenario, Simulation
from megarl.recipe.load import load_recipe
from tests.helpers import refused
from tests.planner.simulated import EXAMPLES, MOE, plan_of

QWEN = "qwen2_5_math_7b/mu_grpo.toml"
WHOLE = ("actor.layers=transformer_engine",)  # every response is computed with its prompt, as in verl
EQUAL = Assumptions(mean_response=1.0)  # all responses have the longest length


def simulation(path=QWEN, devices=8, changes=(), assume=None, **scenario):
    return Simulation(
        plan_of(path, devices, changes=changes, assume=assume),
        Scenario(**dict(updates=4096, stage=1024, sync_every=4, lag=1023) | scenario),
    )


def test_decoding_equals_a_simulation_token_by_token():
    """Of more responses than there are slots, the time until fewer wait is that of full slots."""
    found = simulation(assume=Assumptions(mean_response=0.3))
    longest, slots, each = 3072, len(found.step) - 1, found.plan.responses_per_update
    lengths = (longest * ((np.arange(2 * each) + 0.5) / (2 * each)) ** (1 / 0.3 - 1)).round()
    assert 2 * each < slots and lengths.mean() == pytest.approx(0.3 * longest, rel=1e-3)
    seconds = sum(found.step[(lengths > token).sum()] for token in range(longest))
    assert found.decode_seconds(2, 1) == pytest.approx(seconds, rel=2e-3)  # lengths of the test are rounded
    more = found.decode_seconds(12, 1) - found.decode_seconds(8, 1)
    assert 8 * each > slots and more == pytest.approx(4 * each * 0.3 * longest / slots * found.step[slots])


def test_a_staged_run_takes_the_time_of_the_plan():
    """Each replica has 32768 responses per stage, 32 times as many as it decodes together."""
    calm = simulation(assume=EQUAL)
    run = calm.staged()
    assert len(calm.step) - 1 == 1024
    assert run.total == pytest.approx(4 * calm.plan.stage_seconds, rel=1e-9)
    assert run.generating == pytest.approx(4 * calm.plan.seconds["rollouts"], rel=1e-9)


def test_a_live_run_takes_the_time_of_its_slower_role():
    """Slow trainers: the first version and then all updates. Slow engines: all generation."""
    calm = simulation(handover=0.0, updates=512, stage=64, assume=EQUAL)
    plan, start = calm.plan, calm.plan.assume.engine_start
    run = calm.live(4)
    work = 512 * 2 * plan.update_seconds() + 8 * calm.checkpoint
    first = 3072 * calm.step[256]  # four batches of 256 on four engines
    assert run.total == pytest.approx(start + first + work, rel=1e-9)
    slow = Simulation(replace(plan, assume=replace(plan.assume, decode_efficiency=0.002)), calm.scenario)
    run = slow.live(4)
    generated = 512 * 256 / 4 / 1024 * 3072 * slow.step[1024]
    assert generated > work and run.total == pytest.approx(start + 3072 * slow.step[256] + generated) and run.idle > 0.4


TABLE_1 = {  # mu-GRPO, hours: rollouts and total of GRPO with S = 4, then of mu-GRPO with S = 1024
    "llama3_2_3b": (15.1, 22.7, 12.7, 18.6),
    "qwen2_5_math_7b": (8.8, 23.7, 4.7, 18.1),
    "qwen3_1_7b": (11.2, 20.5, 5.2, 12.4),
    "qwen3_8b": (21.3, 58.2, 7.9, 25.9),
    "deepseek_7b": (26.0, 61.9, 21.4, 51.3),
}
DOCUMENT = (EXAMPLES.parent / "docs/scale.md").read_text()


def test_mu_grpo_table_1():
    """On 8 and on 4 GPUs, since the paper's number is not known. Engines get new weights in 0.12 s."""
    published = ratios_of(TABLE_1.values())
    assert published == pytest.approx((1.82, 1.53), abs=0.01)  # what the paper says of its table
    for devices in (8, 4):
        hours = []
        for name in TABLE_1:
            found = simulation(f"{name}/mu_grpo.toml", devices, WHOLE, handover=0.12)
            four, bulk = found.lockstep(), found.staged()
            hours.append((four.generating, four.total, bulk.generating, bulk.total))
        both = zip(ratios_of(hours), published, strict=True)
        cells = " ".join(f"{ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |" for ours, theirs in both)
        assert f"| {devices} x H200 | {cells}" in DOCUMENT, cells


def ratios_of(hours):
    """Hours with S = 4 over those with S = 1024, mean over models: of rollouts, and in total."""
    return np.mean([(r4 / r, t4 / t) for r4, t4, r, t in hours], axis=0)


def test_mu_grpo_table_2():
    """Idle time and speed-up, with engines on two GPUs, trainers on two, and new weights every 4 updates."""
    near, far = (simulation(devices=4, changes=WHOLE, handover=0.12, lag=lag).live(2) for lag in (3, 1023))
    speedup, published = near.total / far.total, 22.3 / 17.4
    idle = f"| {near.idle:.1%} | 24.2% | {far.idle:.1%} | 0.6% |"
    row = f"{idle} {speedup:.2f} | {published:.2f} | {speedup / published:.2f} |"
    assert row in DOCUMENT, row


def test_a_live_recipe_becomes_a_staged_one_on_the_same_gpus():
    """In MinPRO's live recipe engines and trainers share the GPUs, so the staged run has the same number."""
    recipe = load_recipe(MOE)
    staged = Simulation.recipe(recipe, 160)
    assert staged.schedule.kind == "staged" and staged.schedule.updates_per_stage == 160
    assert staged.devices_per_node == recipe.devices_per_node == 8
    scenario = Scenario.of(recipe.schedule, {})
    assert (scenario.updates, scenario.stage, scenario.sync_every, scenario.lag) == (1920, 160, 16, 47)


def test_a_lag_below_that_of_a_version_is_refused():
    with pytest.raises(UserError, match="--lag 2: with new weights every 4 updates it must be at least 3"):
        Scenario.of(load_recipe(EXAMPLES / QWEN).schedule, {"lag": 2})


def test_weights_go_through_storage():
    """By hand: 15.2 GB of weights are written once and read by 8 replicas at 2 GB/s."""
    found = simulation(updates=512, stage=128, lag=127)
    slow, fast = (replace(found, scenario=replace(found.scenario, handover=h)).lockstep() for h in (None, 0.12))
    assert slow.storage - fast.storage == pytest.approx(512 / 4 * (7.6156 * 9 - 0.12), rel=1e-3)
    assert slow.total == slow.generating + slow.training + slow.storage


@pytest.mark.usefixtures("shared_counter")
def test_command_line(capsys):
    command = ["simulate", str(EXAMPLES / "llama3_2_3b/mu_grpo.toml"), "--updates", "256", "--stage", "64"]
    main([*command, "--sync-every", "8", "--lag", "31", "--mfu", "0.2", "--handover", "1"])
    found = capsys.readouterr().out
    assert "256 updates of 32 prompts x 8 responses on 1 x 8 h200: hours" in found
    assert "lock-step, new weights every 8 " in found and "live, lag up to 31, engines on " in found
    for more, message in (
        (["--stage", "100"], "--updates 256, --stage 100 and --sync-every 4: each must be"),
        (["--set", "actor.tokens_per_micro_batch=4000000"], "does not fit: optimize phase, activations"),
    ):
        assert message in refused(*command, *more)
