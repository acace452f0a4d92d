"""`megarl simulate`, compared with closed forms, `megarl plan`, and tables 1 and 2 of mu-GRPO."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megarl.cli import main
from megarl.errors import UserError
from megarl.planner.cluster import Lengths, cut_mean, decode_seconds
from megarl.planner.simulate import HOUR, Scenario, Simulation
from megarl.recipe.load import load_recipe
from tests.helpers import refused
from tests.planner.simulated import EXAMPLES, MOE, plan_of

CALM = dict(spread=0.0, failures=0.0)  # nothing is random: equal lengths, no failures
QWEN = "qwen2_5_math_7b/mu_grpo.toml"


WHOLE = ("actor.layers=transformer_engine",)  # every response is computed with its prompt, as in verl


def simulation(path=QWEN, devices=8, changes=(), **scenario):
    return Simulation(
        plan_of(path, devices, changes=changes),
        Scenario(**dict(updates=4096, stage=1024, sync_every=4, lag=1023) | scenario),
    )


@pytest.mark.parametrize(("mean", "spread"), [(500, 0.6), (950, 0.6), (300, 2.0)])
def test_lengths_have_the_given_mean_after_the_cut(mean, spread):
    lengths = Lengths.of_mean(mean, 1000, spread)
    assert cut_mean(lengths.log_median, spread, 1000) == pytest.approx(mean, rel=1e-9)
    drawn = lengths.draw(np.random.default_rng(0), (200_000,))
    assert drawn.max() <= 1000 and drawn.mean() == pytest.approx(mean, rel=5 * spread / math.sqrt(200_000))
    drawn = Lengths.of_mean(1000, 1000, spread).draw(np.random.default_rng(0), (3,))
    assert drawn.tolist() == pytest.approx([1000] * 3), "all have the longest length"


def test_decoding_equals_a_simulation_token_by_token():
    rng = np.random.default_rng(1)
    step = 1.0 + rng.random(6).cumsum()
    for count in (3, 5, 6, 23):
        lengths = rng.integers(1, 40, (2, count)).astype(float)
        for row, seconds in zip(lengths, decode_seconds(lengths, step), strict=True):
            waiting, running, expected = list(row), [], 0.0
            while waiting or running:
                while waiting and len(running) < 5:
                    running.append(waiting.pop(0))
                expected += step[len(running)]
                running = [left - 1 for left in running if left > 1]
            assert seconds == pytest.approx(expected)


def test_a_calm_staged_run_takes_the_time_of_the_plan():
    """Each replica has 32768 responses per stage, 32 times as many as it decodes together."""
    calm = simulation(**CALM)
    run = calm.staged(np.random.default_rng(0))
    assert len(calm.step) - 1 == 1024
    assert run.total == pytest.approx(4 * calm.plan.stage_seconds, rel=1e-9)
    assert run.generating == pytest.approx(4 * calm.plan.seconds["rollouts"], rel=1e-9)


def test_a_calm_live_run_takes_the_time_of_its_slower_role():
    """Slow trainers: the first batch and then all updates. Slow engines: all generation and then the last updates."""
    calm = simulation(handover=0.0, updates=512, stage=64, **CALM)
    plan, start = calm.plan, calm.plan.assume.engine_start
    length = plan.assume.mean_response * 3072
    run = calm.live(np.random.default_rng(0), 4)
    work = 512 * 2 * plan.update_seconds() + 8 * calm.checkpoint
    assert run.total == pytest.approx(start + length * calm.step[1024] + work, rel=1e-9)
    slow = Simulation(replace(plan, assume=replace(plan.assume, decode_efficiency=0.002)), calm.scenario)
    run = slow.live(np.random.default_rng(0), 4)
    generated = 512 * 256 / 4 / 1024 * length * slow.step[1024]
    assert generated > work and start + generated < run.total < 1.05 * (start + generated)
    assert run.idle > 0.4


def test_failures_cost_what_closed_forms_say():
    """A checkpoint every 64 updates: work of s seconds takes (exp(rate s) - 1) (1 / rate + restart) on average."""
    calm = simulation(**CALM).staged(np.random.default_rng(0))
    found = simulation(spread=0.0, failures=20.0, restart=300.0).staged(np.random.default_rng(0))
    rate, segment = 20.0 / 86400, calm.total / 64
    expected = 64 * math.expm1(rate * segment) * (1 / rate + 300)
    assert found.total == pytest.approx(expected) and found.lost == pytest.approx(expected - calm.total)
    assert calm.lost == 0 and expected > 1.05 * calm.total


TABLE_1 = {  # mu-GRPO, hours: rollouts and total of GRPO with S = 4, then of mu-GRPO with S = 1024
    "llama3_2_3b": (15.1, 22.7, 12.7, 18.6),
    "qwen2_5_math_7b": (8.8, 23.7, 4.7, 18.1),
    "qwen3_1_7b": (11.2, 20.5, 5.2, 12.4),
    "qwen3_8b": (21.3, 58.2, 7.9, 25.9),
    "deepseek_7b": (26.0, 61.9, 21.4, 51.3),
}
DOCUMENT = (EXAMPLES.parent / "docs/scale.md").read_text()


def test_mu_grpo_table_1():
    """On 8 and on 4 GPUs, since the paper's number is not known. Engines get new weights in 0.12 s.

    verl computes old log-probs in a separate pass (``passes``), which the staged runs of the paper do not need.
    """
    published = ratios_of(TABLE_1.values())
    assert published[:2] == pytest.approx((1.82, 1.53), abs=0.01)  # what the paper says of its table
    others = ratios_of([hours for name, hours in TABLE_1.items() if name != "qwen3_8b"])
    assert f"{published[2]:.2f} times in the mean, and {others[2]:.2f} without Qwen3-8B" in DOCUMENT.replace("\n", " ")
    for devices in (8, 4):
        hours = []
        for name in TABLE_1:
            found = simulation(f"{name}/mu_grpo.toml", devices, WHOLE, handover=0.12, failures=0.0, passes=1.0)
            four, bulk = found.lockstep(np.random.default_rng(0)), found.staged(np.random.default_rng(0))
            hours.append((four.generating, four.total, bulk.generating, bulk.total))
        ratios = ratios_of(hours)
        both = zip(ratios, published, strict=True)
        cells = " ".join(f"{ours:.2f} | {theirs:.2f} | {ours / theirs:.2f} |" for ours, theirs in both)
        assert f"| {devices} x H200 | {cells}" in DOCUMENT, cells


def ratios_of(hours):
    """Hours with S = 4 over those with S = 1024, mean over models: of rollouts, in total, and of all but rollouts."""
    return np.mean([(r4 / r, t4 / t, (t4 - r4) / (t - r)) for r4, t4, r, t in hours], axis=0)


def test_mu_grpo_table_2():
    """Idle time and speed-up, with engines on two GPUs, trainers on two, and new weights every 4 updates."""
    both = [simulation(devices=4, changes=WHOLE, handover=0.12, failures=0.0, lag=lag) for lag in (3, 1023)]
    near, far = (found.live(np.random.default_rng(0), 2) for found in both)
    speedup, published = near.total / far.total, 22.3 / 17.4
    idle = f"| {near.idle:.1%} | 24.2% | {far.idle:.1%} | 0.6% |"
    assert f"{idle} {speedup:.2f} | {published:.2f} | {speedup / published:.2f} |" in DOCUMENT


def test_a_live_recipe_becomes_a_staged_one_on_the_same_gpus():
    """In MinPRO's live recipe engines and trainers share the GPUs, so the staged run has the same number."""
    recipe = load_recipe(MOE)
    staged = Simulation.recipe(recipe, 160)
    assert staged.schedule.kind == "staged" and staged.schedule.updates_per_stage == 160
    assert staged.devices_per_node == recipe.devices_per_node == 8
    scenario = Scenario.of(recipe.schedule, {})
    assert (scenario.updates, scenario.stage, scenario.sync_every, scenario.lag) == (1920, 160, 16, 47)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lag": 2}, "--lag 2: with new weights every 4 updates it must be at least 3"),
        ({"failures": -1.0}, "--failures -1: at least 0"),
        ({"spread": 5.0}, "--spread 5: up to 3"),
    ],
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        Scenario.of(load_recipe(EXAMPLES / QWEN).schedule, given)


def test_failures_that_let_no_run_end_are_refused():
    with pytest.raises(UserError, match=r"--failures 1e\+06: the .* hours of work between two checkpoints hardly ever"):
        simulation(failures=1e6).staged(np.random.default_rng(0))


def test_the_hand_over_of_weights_is_compared_with_one_from_gpu_to_gpu():
    """By hand: 15.2 GB of weights are written once and read by 8 replicas at 2 GB/s, or handed over at 50 GB/s."""
    found = simulation(updates=512, stage=128, lag=127, seeds=2)
    _, _, said, _, staged, *_ = found.table()
    assert "weights through storage: 7.6 s to write, 60.9 s for 8 replicas to read; GPU to GPU" in said
    assert said.endswith(": 0.3 s")
    runs = found.runs()
    slow, fast = (np.mean([run.storage for run in runs[name]]) for name in list(runs)[1::2])
    assert slow - fast == pytest.approx(512 / 4 * (7.6156 * 9 - 0.3046), rel=1e-3)
    total = np.mean([run.total for run in next(iter(runs.values()))]) / HOUR
    assert f"{total:.2f}" == staged.split()[4]


@pytest.mark.usefixtures("shared_counter")
def test_command_line(capsys):
    command = ["simulate", str(EXAMPLES / "llama3_2_3b/mu_grpo.toml"), "--updates", "256", "--stage", "64"]
    main([*command, "--seeds", "2", "--sync-every", "8", "--lag", "31", "--mfu", "0.2", "--handover", "1"])
    found = capsys.readouterr().out
    assert "256 updates of 32 prompts x 8 responses on 1 x 8 h200: hours, mean of 2 seeds" in found
    assert "lock-step, new weights every 8 " in found and "live, lag up to 31, engines on " in found
    assert "get new weights in 1 s (--handover)" in found and "GPU to GPU" not in found
    for more, message in (
        (["--stage", "100"], "--updates 256, --stage 100 and --sync-every 4: each must be"),
        (["--set", "actor.tokens_per_micro_batch=4000000"], "does not fit: optimize phase, activations"),
    ):
        assert message in refused(*command, *more)
