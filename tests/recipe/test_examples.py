"""The recipe that each row of examples/README.md runs, compared with numbers typed from the papers.

Staleness is computed batch by batch for whole runs, with `LagRule` where a run is live.
"""

import math
import random
import shlex
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from megarl.commands.one_phase import branch_recipe
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from tests.helpers import ROOT

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Paper:
    """The setting of a paper: the numbers that all its rows have, but for `CHANGES`.

    examples/README.md has the updates and the lags of each row.
    """

    prompts: int  # per update
    context: int  # tokens of prompt and response together
    lr: float
    suites: dict[str, int]  # responses to each question
    objective: str  # its own; docs/papers_values.toml has the settings of all
    responses: int = 8  # to each prompt
    evaluated_every: int | None = None  # updates; None: the paper does not say
    temperature: float = 1.0  # of evaluations
    top_p: float = 1.0
    best: str = "first"


AIME = {"aime24": 16, "aime25": 16}
PAPERS = {  # by the beginning of the heading in examples/README.md
    # Section 3.2: four updates per step, so stale-k means lags of k to k + 3. Appendix B: 1000 steps, batch size 256,
    # mini-batches of 512 responses; evaluation every 50 steps on eight suites; the checkpoint with the best average
    "M2PO": Paper(
        *(64, 16384, 1e-6),
        AIME | dict.fromkeys(("amc23", "amc24", "math500", "minerva", "gaokao", "olympiad"), 4),
        "m2po",
        evaluated_every=200,
        best="mean",
    ),
    # Section 5 and appendix B.1. The learning rate is lost in the paper's text; 1e-6 is that of M2PO
    "mu-GRPO": Paper(
        *(32, 8192, 1e-6),
        AIME | {"amc23": 4, "amc24": 4, "math500": 4},
        "mu_grpo",
        evaluated_every=200,
        best="mean",
    ),
    # Section 5: 16 updates per global step and a buffer of n = 2 steps, so lags of 16 n to 16 (n + 1) - 1; checkpoints
    # every 10 steps, of which the best counts. Table 3: settings, top-p of evaluations. Section 5.1: samples
    "MinPRO": Paper(
        *(32, 2048 + 20480, 1e-6),
        dict.fromkeys(("aime24", "aime25", "amc23"), 128)
        | dict.fromkeys(("math500", "olympiad", "minerva", "gsm8k"), 2),
        "minpro",
        evaluated_every=160,
        top_p=0.7,
        best="mean",
    ),
    # Section 4.1: S = 11, kappa = 10, 60 steps. The paper does not have batch size and lengths. In table 1 avg@64 is
    # the share of solved problems in each row (.500 and 15 of 30, .400 and 12, .367 and 11), so that all 64 samples of
    # a problem agreed: greedy decoding, of which one sample is enough
    "Prefix-Ratio GRPO": Paper(
        *(32, 2048 + 8192, 1e-6, {"aime24": 1}),
        "prefix_ratio_grpo",
        evaluated_every=60,
        temperature=0.0,
    ),
    # Section 5.1. The other numbers are from the example in the authors' code
    "BAPO": Paper(
        *(64, 1024 + 8192, 2e-6, AIME, "bapo"),
        responses=16,
        temperature=0.6,
    ),
}
CHANGES = {  # of rows with this in their names or commands
    "the authors' top-p": {"top_p": 0.7},
    "Qwen2.5-Math": {"context": 4096},
    **{f"data, batch {prompts}": {"prompts": prompts} for prompts in (64, 128, 256)},
    "programs": {"prompts": 16, "suites": {"livecodebench": 4}, "best": "first"},  # section 5.1 and appendix B.2
    "14B": {"prompts": 16},
    "32k tokens": {"context": 2**15},  # section 5.3, figure 11
    "deepseek_7b/bapo.toml": {"suites": AIME | {"amc23": 16, "olympiad": 16}},  # table 3 of BAPO
    "octothinker": {"suites": AIME | {"math500": 16}},  # appendix B
}
TITLES = {  # the first of these in the name of a row says what its objective is
    "no TR": "reinforce", "mu-GRPO's setting": "grpo", "decoupled PPO": "decoupled_ppo", "clip-higher": "grpo",
    "full prefix": "full_prefix", "filtered": "prefix_filter", "Prefix-Ratio": "prefix_ratio_grpo",
    **{title: title.lower() for title in ("M2PO", "MinPRO", "BAPO", "GSPO", "TOPR", "GPPO", "CISPO", "DAPO")},
    "mu-GRPO": "mu_grpo", "GRPO": "grpo",
}  # fmt: skip


def rows():
    """[(name, command, models, updates, lags, title of the paper)] of each row with a command in README.md."""
    found, heading = [], ""
    for line in (EXAMPLES / "README.md").read_text().splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].startswith("`megarl "):
            name, command, models, updates, lags = cells
            (paper,) = (title for title in PAPERS if heading.startswith(title) or name.startswith(f"{title}'s setting"))
            lags = tuple(map(int, lags.split("-")))
            found.append((name, command.strip("`"), models.split(), int(updates), lags, paper))
    return found


ROWS = {name: row for name, *row in rows()}
assert len(ROWS) == len(rows()) == 81
RUNS = [(name, command.replace("MODEL", model)) for name, (command, models, *_) in ROWS.items() for model in models]
TRAINED = [(name, command) for name, command in RUNS if command.startswith("megarl train ")]
REBATCHED = [(name, command) for name, command in RUNS if command.startswith("megarl optimize ")]


def recipe_of(command):
    words = shlex.split(command)
    assert words[:2] == ["megarl", "train"] and words[3:5] == ["--run-dir", "RUN"]
    changes = words[5:]
    assert all(flag == "--set" for flag in changes[::2])
    return load_recipe(ROOT / words[2], changes[1::2])


def lags_of(recipe):
    """The largest lag of every update of a run.

    Engines are taken to generate as early and as much as the schedule allows, and responses to have the largest length.
    """
    schedule = recipe.schedule
    if recipe.rollout.token_budget:
        size = schedule.updates_per_stage
        begun = [begun for _, groups in partial_rollouts(recipe, lambda group: 10**9) for begun in groups]
        oldest = [begun[i : i + schedule.prompts_per_update] for i in range(0, len(begun), schedule.prompts_per_update)]
        return [update - size * min(stages) for update, stages in enumerate(oldest)]
    if schedule.kind == "staged":
        return [update for _ in range(schedule.stages) for update in range(schedule.updates_per_stage)]
    rule, total, size = schedule.lag_rule, schedule.total_updates, schedule.updates_per_stage
    versions, done = [], 0
    while done < total:
        newest = done - done % rule.sync_every
        end = (done - done % size + size) // schedule.passes  # batches until the end of the stage
        while len(versions) < end:
            version = rule.version(schedule.first_update_of(len(versions)), newest)
            if version is None:
                break
            versions.append(version)
        done += 1
        # on shared devices, trainers train everything that is there before engines continue
        while schedule.colocate and done < total and schedule.batch_of(done)[0] < len(versions):
            done += 1
    return [update - versions[schedule.batch_of(update)[0]] for update in range(total)]


def partial_rollouts(recipe, length):
    """(stage, [stage in which each group that it trains was begun]) of each stage, by the rule of docs/schedules.md.

    length: the number of tokens after which a group is complete, as a function of its id.
    """
    wanted, play, generated = recipe.groups_per_stage, [], {}
    for stage in range(recipe.schedule.stages):
        play += recipe.groups_begun(stage)
        for group in play:
            generated[group] = generated.get(group, 0) + recipe.rollout.token_budget
        ends = {group: min(length(group), recipe.rollout.max_response_tokens) for group in play}
        complete = [group for group in play if generated[group] >= ends[group]]
        cut = [group for group in play if generated[group] < ends[group]]
        trained = sorted([*complete, *cut[: max(0, wanted - len(complete))]])[:wanted]
        yield stage, [recipe.stage_that_begins(group) for group in trained]
        play = [group for group in play if group not in set(trained)]


@pytest.mark.parametrize(("name", "command"), TRAINED, ids=[f"{c.split()[2].split('/')[1]}: {n}" for n, c in TRAINED])
def test_a_row_has_the_papers_numbers(name, command):
    check_numbers(recipe_of(command), name, command)


@pytest.mark.parametrize(("name", "command"), REBATCHED)
def test_a_row_on_fixed_rollouts_has_the_papers_numbers(tmp_path, name, command):
    (fixed,) = (recipe_of(command) for name, command in TRAINED if name == "table 4, fixed data, batch 32")
    words = shlex.split(command)
    assert words[:7] == ["megarl", "optimize", "FIXED", "--stage", "0", "--output", "RUN"]
    assert set(words[7::2]) == {"--set"}
    stage = RunDir.create(tmp_path / "run", fixed).stage(0)
    for path in (stage.policy, stage.rollouts):
        path.mkdir(parents=True)
    check_numbers(branch_recipe(stage, words[8::2]), name, command)


def check_numbers(recipe, name, command):
    *_, updates, (least, most), title = ROWS[name]
    known = f"{name}: {command} {recipe.model.path.name}"
    changes = [change for part, change in CHANGES.items() if part in known]
    paper = replace(PAPERS[title], **{key: value for change in changes for key, value in change.items()})
    schedule, rollout, suites = recipe.schedule, recipe.rollout, recipe.suites
    lags = lags_of(recipe)
    # the first updates train data of the first policy for lack of a later one
    warms_up = schedule.kind == "live" and (schedule.delay or schedule.colocate)
    later = lags[schedule.lag_rule.max_lag + 1 :] or lags if warms_up else lags
    assert len(lags) == schedule.total_updates == updates
    assert set(later) == set(range(least, most + 1)) and max(lags) <= most
    assert (schedule.prompts_per_update, rollout.responses_per_prompt) == (paper.prompts, paper.responses)
    assert recipe.data.max_prompt_tokens + rollout.max_response_tokens == paper.context
    assert recipe.optimizer.lr == paper.lr
    assert recipe.objective.name == next((TITLES[part] for part in TITLES if part in name), paper.objective)
    if paper.evaluated_every:
        evaluated = [n for n in range(schedule.total_updates) if recipe.is_evaluated(n)]
        assert evaluated == list(range(0, schedule.total_updates, paper.evaluated_every))
    assert recipe.is_evaluated(0) and recipe.is_evaluated(schedule.total_updates) and recipe.eval.best == paper.best
    assert {suite.name: suite.samples for suite in suites} == paper.suites
    assert {(suite.temperature, suite.top_p) for suite in suites} == {(paper.temperature, paper.top_p)}


def test_stale_256_first_trains_rollouts_of_the_base_model_and_then_has_four_lags_equally_often():
    lags = lags_of(recipe_of(RUNS[0][1]))
    assert lags[:260] == list(range(260))
    assert Counter(lags[260:]) == dict.fromkeys(range(256, 260), (4000 - 260) // 4)


@pytest.mark.parametrize(("budget", "oversample", "stages"), [(2731, 1.5, 2), (4096, 4, 3)])
def test_a_group_waits_at_most_as_many_stages_as_the_docs_say(budget, oversample, stages):
    """docs/schedules.md says at most m + ceil(oversample) - 3 stages; random lengths reach this bound."""
    sizes = [f"rollout.token_budget={budget}", f"rollout.oversample={oversample}"]
    path = EXAMPLES / "deepseek_7b/bapo-partial.toml"
    recipe = load_recipe(path, [*sizes, "schedule.stages=12", "schedule.prompts_per_update=2"])
    assert stages == math.ceil(8192 / budget) + math.ceil(oversample) - 3
    waits = set()
    for seed in range(20):
        lengths = random.Random(seed).choices([1, budget + 1, 8192], k=recipe.prompts_needed)
        waits |= {stage - min(begun) for stage, begun in partial_rollouts(recipe, lengths.__getitem__)}
    assert max(waits) == stages
