"""A whole run of every kind of example recipe, scaled down to the size of a test: see `toy`."""

import itertools
import tomllib

import pytest
import tomli_w

from megarl.storage.run_dir import RunDir
from tests.extent import few
from tests.helpers import ROOT, events, metrics
from tests.phases.commands import succeed, train

# example: its settings that are scaled down, and the lags that follow: of every update, or an int, the largest one
FAMILIES = {
    # stale-256: in the paper lags 256 to 259, after 256 updates on rollouts of the base model
    "qwen3_8b/m2po": ({"stages": 2, "updates_per_stage": 16, "delay": 4}, [*range(16), *[16, 17, 18, 19] * 4]),
    # four stages of frozen rollouts
    "qwen3_8b/mu_grpo": ({"updates_per_stage": 8, "every_updates": 12}, [*range(8)] * 4),
    # n = 2: in the paper lags 32 to 47, after 32 updates
    "qwen3_8b/minpro": ({"stages": 2, "updates_per_stage": 16, "sync_every": 4}, [*range(8), *[8, 9, 10, 11] * 6]),
    # engines are at most S = 11 updates behind, and get a new policy every kappa = 10 updates; in the paper 60 or 12
    "qwen3_8b/prefix_ratio_grpo": ({"updates_per_stage": 26}, [*range(12), *range(2, 12), *range(2, 6)]),
    # every batch is trained twice
    "deepseek_7b/bapo-replay": ({"stages": 2, "updates_per_stage": 16}, [*range(8)] * 4),
    # a response gets two tokens per stage and ends in its third stage at the latest
    "deepseek_7b/bapo-partial": ({"stages": 3, "every": 1, "token_budget": 2}, 11),
    "qwen2_5_math_7b/mu_grpo-async": ({"updates_per_stage": 32, "max_lag": 15, "every_updates": 12}, 15),
}


def toy(tiny, example, divided):
    """The example's tables with the model, data, reward and sizes of the tiny recipe and a divided schedule."""
    table, theirs = (tomllib.loads(path.read_text()) for path in (tiny, ROOT / f"examples/{example}.toml"))
    table |= {name: theirs[name] for name in ("objective", "schedule", "optimizer", "eval")}
    for key in ("temperature", "responses_per_prompt", "oversample", "require_stop"):
        for name in ("rollout", "reward"):
            table[name] |= {key: theirs[name][key]} if key in theirs[name] else {}
    for key in ("suites", "suite", "source", "data", "samples"):
        table["eval"].pop(key, None)
    table["optimizer"].pop("warmup_step", None)
    table["actor"]["checkpoint_every"] = 8
    table["eval"] |= {"prompts": 16} if table["eval"].get("greedy") else {"prompts": 16, "samples": 2}
    table["optimizer"] |= {"lr": 2e-4, "warmup_updates": 0}
    table["schedule"]["prompts_per_update"] = 4
    places = {"every": "eval", "every_updates": "eval", "token_budget": "rollout"}
    for key, value in divided.items():
        table[places.get(key, "schedule")][key] = value
    return table


# a live and a partial one
@pytest.mark.parametrize("example", few(FAMILIES, "qwen3_8b/m2po", "deepseek_7b/bapo-partial"))
def test_a_scaled_down_example_has_the_lags_and_evaluations_of_its_schedule(example, recipe, tmp_path):
    divided, lags = FAMILIES[example]
    table, path = toy(recipe, example, divided), tmp_path / "run"
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(table))
    train(tmp_path / "recipe.toml", path)
    run = RunDir.open(path)
    schedule, updates = run.recipe.schedule, metrics(run)
    assert [update["update"] for update in updates] == list(range(1, schedule.total_updates + 1))
    found = [update["staleness"] for update in updates]
    if isinstance(lags, int):
        assert max(found) <= lags and min(itertools.islice(found, lags, None)) < lags
    else:
        assert found == lags
    assert run.recipe.objective.name == table["objective"]["name"]
    assert any(update["grad_norm"] > 0 for update in updates)
    occasions = [event["update"] for event in events(run, "evaluation")]
    assert occasions == [n for n in range(schedule.total_updates + 1) if run.recipe.is_evaluated(n)]
    assert len(occasions) > 2 or schedule.stages == 1
    assert (path / "final/config.json").exists()
    succeed("audit", path)
