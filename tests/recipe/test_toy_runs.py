"""A whole run of every kind of example recipe, scaled down to the size of a test.

Model, data, reward and sizes are those of the tiny recipe. Objective, kind of schedule and what follows from it, parts
of the optimizer, and evaluations are the example's, with a scaled-down schedule.
"""

import itertools
import json
import tomllib

import pytest
import tomli_w

from megarl.storage.run_dir import RunDir
from tests.extent import few
from tests.helpers import ROOT, events, five_letters, megarl, metrics

TINY = {
    "model.tokenizer": None,
    "data.source": "file",
    "data.prompt_template": "{prompt}=",
    "data.max_prompt_tokens": 8,
    "reward.kind": "exact",
    "rollout.engine": "builtin",
    "rollout.workers": 1,
    "rollout.tensor_parallel": 1,
    "rollout.max_response_tokens": 6,
    "rollout.groups_per_chunk": 8,
    "optimizer.lr": 2e-4,
    "optimizer.warmup_updates": 0,
    "optimizer.warmup_step": None,
    "actor.checkpoint_every": 8,
    "eval.prompts": 16,
    "eval.samples": 2,
    "schedule.prompts_per_update": 4,
    "run.tensorboard": False,
}
# example: its settings that are scaled down, and the lags that follow: of every update, or an int, the largest one
FAMILIES = {
    # stale-256: in the paper lags 256 to 259, after 256 updates on rollouts of the base model
    "qwen3_8b/m2po": ({"stages": 2, "updates_per_stage": 16, "delay": 4}, [*range(16), *[16, 17, 18, 19] * 4]),
    # four stages of frozen rollouts
    "qwen3_8b/mu_grpo": ({"updates_per_stage": 8, "every_updates": 12}, [*range(8)] * 4),
    # n = 2: in the paper lags 32 to 47, after 32 updates
    "qwen3_8b/minpro": (
        {"stages": 2, "updates_per_stage": 16, "sync_every": 4},
        [*range(8), *[8, 9, 10, 11] * 6],
    ),
    # engines are at most S = 11 updates behind, and get a new policy every kappa = 10 updates; in the paper 60 or 12
    "qwen3_8b/prefix_ratio_grpo": ({"updates_per_stage": 26}, [*range(12), *range(2, 12), *range(2, 6)]),
    # every batch is trained twice
    "deepseek_7b/bapo-replay": ({"stages": 2, "updates_per_stage": 16}, [*range(8)] * 4),
    # a response gets two tokens per stage and ends in its third stage at the latest
    "deepseek_7b/bapo-partial": ({"stages": 3, "every": 1, "token_budget": 2}, 11),
    "qwen2_5_math_7b/mu_grpo-async": ({"updates_per_stage": 32, "max_lag": 15, "every_updates": 12}, 15),
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": word, "answer": word[0]}) + "\n" for word in five_letters()))
    return file


def toy(example, divided, model, prompts):
    """The tables of the example with the tiny model and a scaled-down schedule."""
    table = tomllib.loads((ROOT / f"examples/{example}.toml").read_text())
    for tables in ("actor", "megatron", "megatron_ddp", "megatron_optimizer"):  # their settings are for GPUs
        table.pop(tables, None)
    table["actor"], table["data"] = {"backend": "cpu"}, {}
    table["reward"] = {key: table["reward"][key] for key in ("require_stop",) if key in table["reward"]}
    for key in ("suites", "suite", "source", "data"):
        table["eval"].pop(key, None)
    kept = ("temperature", "responses_per_prompt", "oversample")
    table["rollout"] = {key: table["rollout"][key] for key in kept if key in table["rollout"]}
    settings = TINY | {"model.path": str(model), "data.train": str(prompts)}
    places = {"every": "eval", "every_updates": "eval", "token_budget": "rollout"}
    settings |= {f"{places.get(key, 'schedule')}.{key}": value for key, value in divided.items()}
    if table["eval"].get("greedy"):  # one response to a prompt
        settings["eval.samples"] = None
    for key, value in settings.items():
        name, field = key.split(".")
        table.setdefault(name, {})[field] = value
    return {name: {key: value for key, value in keys.items() if value is not None} for name, keys in table.items()}


# a live and a partial one
@pytest.mark.parametrize("example", few(FAMILIES, "qwen3_8b/m2po", "deepseek_7b/bapo-partial"))
def test_a_scaled_down_example_has_the_lags_and_evaluations_of_its_schedule(example, guessing_model, prompts, tmp_path):
    divided, lags = FAMILIES[example]
    table = toy(example, divided, guessing_model, prompts)
    recipe, path = tmp_path / "recipe.toml", tmp_path / "run"
    recipe.write_text(tomli_w.dumps(table))
    trained = megarl("train", str(recipe), "--run-dir", str(path))
    assert trained.returncode == 0, trained.stderr
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
    audited = megarl("audit", str(path))
    assert audited.returncode == 0, audited.stdout
