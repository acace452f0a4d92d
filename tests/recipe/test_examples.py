"""The recipe that each row of examples/README.md runs, compared with numbers typed from the papers.

Staleness is computed batch by batch for whole runs, with `LagRule` where a run is live.
"""

import math
import random
import shlex
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from megarl.commands.one_phase import branch_recipe
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from tests.helpers import ROOT

EXAMPLES = ROOT / "examples"


@dataclass(frozen=True)
class Paper:
    """The numbers that a paper gives for the run of a row."""

    updates: int
    lags: tuple[int, int]  # smallest and largest, after the warm-up of the schedule
    prompts: int  # per update
    context: int  # tokens of prompt and response together
    lr: float
    objective: dict[str, object]
    responses: int = 8  # to each prompt
    evaluated_every: int | None = None  # updates; None: the paper does not say
    suites: dict[str, int] = field(default_factory=dict)  # responses to each question
    temperature: float = 1.0  # of evaluations
    top_p: float = 1.0
    best: str = "first"


def m2po(name, lags=(256, 259), **objective):
    """Section 3.2: four updates per step, so stale-k means lags of k to k + 3.

    Appendix B: 1000 steps, batch size 256, mini-batches of 512 responses, 8 responses per prompt, lr 1e-6, context 16k
    (4k for Qwen2.5-Math-7B); evaluation every 50 steps on eight suites, avg@16 for AIME and avg@4 for the others; the
    checkpoint with the best average is reported.
    """
    four = dict.fromkeys(("amc23", "amc24", "math500", "minerva", "gaokao", "olympiad"), 4)
    evaluated = {"evaluated_every": 200, "suites": {"aime24": 16, "aime25": 16, **four}, "best": "mean"}
    return Paper(4000, lags, 64, 16384, 1e-6, {"name": name, **objective}, **evaluated)


def mu_grpo(name, lags, updates=4096, **objective):
    """Section 5: 4096 updates with batch size 32, context 8k (4k for Qwen2.5-Math-7B).

    Appendix B.1: 8 responses per prompt; evaluation every 200 updates on five suites, avg@16 for AIME and avg@4 for the
    others; the checkpoint with the best average is reported. The learning rate is lost in the paper's text; 1e-6 is
    that of M2PO.
    """
    suites = {"aime24": 16, "aime25": 16, "amc23": 4, "amc24": 4, "math500": 4}
    evaluated = {"evaluated_every": 200, "suites": suites, "best": "mean"}
    return Paper(updates, lags, 32, 8192, 1e-6, {"name": name, **objective}, **evaluated)


def programs(name, lags, **objective):
    """Section 5.1 and appendix B.2: batch size 16, pass@4 on LiveCodeBench; all else as in the main experiments."""
    suites = {"livecodebench": 4}
    return replace(mu_grpo(name, lags, **objective), prompts=16, suites=suites, best="first")


def minpro(name, steps, prompts, lags=(32, 47), **objective):
    """Section 5: 16 updates per global step and a buffer of n = 2 steps, so lags of 16 n to 16 (n + 1) - 1.

    Checkpoints are made every 10 steps, and the one with the highest average is reported. Table 3 has the settings and
    top-p of the evaluations, section 5.1 the samples per question of each suite.
    """
    suites = dict.fromkeys(("aime24", "aime25", "amc23"), 128)
    suites |= dict.fromkeys(("math500", "olympiad", "minerva", "gsm8k"), 2)
    evaluated = {"evaluated_every": 160, "suites": suites, "top_p": 0.7, "best": "mean"}
    return Paper(16 * steps, lags, prompts, 2048 + 20480, 1e-6, {"name": name, **objective}, **evaluated)


def prefix(name, lags=(2, 11), updates=60, **objective):
    """Section 4.1: S = 11, kappa = 10, 60 steps. The paper does not have batch size and lengths.

    In table 1 avg@64 is the share of solved problems in each row (.500 and 15 of 30, .400 and 12, .367 and 11), so that
    all 64 samples of a problem agreed: greedy decoding, of which one sample is enough.
    """
    evaluated = {"evaluated_every": updates, "suites": {"aime24": 1}, "temperature": 0.0}
    return Paper(updates, lags, 32, 2048 + 8192, 1e-6, {"name": name, **objective}, **evaluated)


def bapo(name, lags=(0, 7), tokens=1024 + 8192, **objective):
    """Section 5.1: responses of 8k tokens, lr 2e-6, evaluation at temperature 0.6, avg@16 for AIME24 and AIME25.

    Section 5.3, figure 11: sequences of 32k tokens. The other numbers are from the example in the authors' code.
    """
    evaluated = {"suites": {"aime24": 16, "aime25": 16}, "temperature": 0.6}
    return Paper(8000, lags, 64, tokens, 2e-6, {"name": name, **objective}, responses=16, **evaluated)


GRPO = {"eps_low": 0.2, "eps_high": 0.2, "aggregation": "token_mean"}
TABLE3 = {  # table 3 of MinPRO
    "MinPRO": ("minpro", {"eps_low": 1.0, "eps_high": 4.0, "aggregation": "token_mean"}),
    "GRPO": ("grpo", {"eps_low": 0.2, "eps_high": 0.28, "aggregation": "token_mean"}),
    "GSPO": ("gspo", {"eps_low": 2e-3, "eps_high": 2e-3, "aggregation": "sequence_mean"}),
    "CISPO": ("cispo", {"eps_low": 1.0, "eps_high": 4.0, "aggregation": "token_mean"}),
    "M2PO": ("m2po", {"m2_threshold": 0.04, "aggregation": "token_mean"}),
}
PAPERS = {
    "table 1, M2PO s = 256": m2po("m2po", m2_threshold=0.04),
    "table 1, M2PO s = 256, with the authors' top-p": replace(m2po("m2po"), top_p=0.7),
    "table 1, GRPO s = 0": m2po("grpo", (0, 3), **GRPO),
    "table 1, GRPO s = 256": m2po("grpo", **GRPO),
    "figure 2, GRPO s = 8": m2po("grpo", (8, 11), **GRPO),
    "table 1, GSPO s = 256": m2po("gspo", eps_low=3e-4, eps_high=4e-4),
    "figure 6, decoupled PPO (AReaL) s = 256": m2po("decoupled_ppo", proximal_updates=4),
    "figure 6, TOPR s = 256": m2po("topr"),
    "figure 6, GPPO s = 256": m2po("gppo"),
    "figure 6, CISPO s = 256": m2po("cispo"),
    "figures 1 and 3, GRPO no TR s = 256": m2po("reinforce"),
    "table 1, mu-GRPO S = 1024": mu_grpo("mu_grpo", (0, 1023), ratio_max=5.0, veto_scope="sequence"),
    "table 1, GRPO S = 1024": mu_grpo("grpo", (0, 1023), **GRPO),
    "table 1, M2PO S = 1024": mu_grpo("m2po", (0, 1023), m2_threshold=0.04),
    "table 1, GRPO S = 4": mu_grpo("grpo", (0, 3), **GRPO),
    "table 2, mu-GRPO, lag 1024": mu_grpo("mu_grpo", (0, 1023), ratio_max=5.0),
    "table 2, GRPO, lag 4": mu_grpo("grpo", (0, 3), **GRPO),
    "table 4, fixed data, batch 32": mu_grpo("mu_grpo", (0, 1258), updates=1259),
    # 8 responses to each prompt of DeepScaleR; table 4 has the number of updates
    "table 4, fixed data, batch 64": replace(mu_grpo("mu_grpo", (0, 628), updates=629), prompts=64),
    "table 4, fixed data, batch 128": replace(mu_grpo("mu_grpo", (0, 313), updates=314), prompts=128),
    "table 4, fixed data, batch 256": replace(mu_grpo("mu_grpo", (0, 156), updates=157), prompts=256),
    "table 4, S = 512": mu_grpo("mu_grpo", (0, 511)),
    "table 4, S = 2048": mu_grpo("mu_grpo", (0, 2047)),
    "table 4, S = 4096": mu_grpo("mu_grpo", (0, 4095)),
    "figure 3, no mask": mu_grpo("mu_grpo", (0, 1023), veto_threshold=0.0, ratio_max=5.0),
    "figure 3, trigger mask": mu_grpo("mu_grpo", (0, 1023), veto_scope="trigger", ratio_max=5.0),
    "table 6, scope non-trigger suffix": mu_grpo("mu_grpo", (0, 1023), veto_scope="non_trigger_suffix"),
    "table 6, scope suffix": mu_grpo("mu_grpo", (0, 1023), veto_scope="suffix"),
    "table 8, upper bound 3": mu_grpo("mu_grpo", (0, 1023), ratio_max=3.0),
    "table 8, upper bound 10": mu_grpo("mu_grpo", (0, 1023), ratio_max=10.0),
    "table 8, no upper bound": mu_grpo("mu_grpo", (0, 1023), ratio_max=float("inf")),
    "section 5.1, programs: mu-GRPO S = 1024": programs("mu_grpo", (0, 1023), ratio_max=5.0),
    "section 5.1, programs: GRPO S = 4": programs("grpo", (0, 3), **GRPO),
    "table 9, mu-GRPO S = 4": mu_grpo("mu_grpo", (0, 3), ratio_max=5.0),
    **{f"tables 1 and 2, {k} 8B": minpro(name, 120, 32, **o) for k, (name, o) in TABLE3.items()},
    **{f"tables 1 and 2, {k} 14B": minpro(name, 160, 16, **o) for k, (name, o) in TABLE3.items()},
    **{f"figure 4, {k} 30B-A3B": minpro(name, 120, 32, **o) for k, (name, o) in TABLE3.items()},
    **{
        f"figure 2, {k} on-policy": minpro(TABLE3[k][0], 120, 32, (0, 15), **TABLE3[k][1])
        for k in ("GRPO", "GSPO", "CISPO")
    },
    "section 6.2, full prefix ratio 8B": minpro("full_prefix", 120, 32, eps_low=1.0, eps_high=4.0),
    "section 6.2, lowest 1 % filtered 8B": minpro("prefix_filter", 120, 32, filter_fraction=0.01),
    "equation 5 without a stop-gradient": prefix("prefix_ratio_grpo", eps_low=0.2, prefix_gradient="full"),
    "table 1, Prefix-Ratio GRPO": prefix("prefix_ratio_grpo", eps_low=0.2, eps_high=0.2),
    "table 1, one of three seeds": prefix("prefix_ratio_grpo", (0, 11), updates=12),  # section 4.1: 12 steps each
    "table 1, vanilla GRPO": prefix("grpo", eps_low=0.2, eps_high=0.2, aggregation="sequence_mean"),
    "table 1, tight-clip GRPO": prefix("grpo", eps_low=0.1, eps_high=0.1, aggregation="sequence_mean"),
    "figure 8, table 2: BAPO": bapo(
        "bapo",
        positive_target=0.4, low_start=0.6, low_end=0.9, low_step=0.02,
        high_start=1.2, high_end=3.0, high_step=0.05,
    ),
    "table 3, Math: BAPO": bapo("bapo"),
    "table 3, Math: GRPO": bapo("grpo"),
    "table 4: DAPO": bapo("dapo", eps_low=0.2, eps_high=0.28, zero_variance="drop"),
    "table 4: TOPR": bapo("topr"),
    "table 2, figure 13: BAPO": bapo(  # appendix B
        "bapo",
        positive_target=0.45, low_start=0.8, low_end=0.9, low_step=0.02,
        high_start=1.2, high_end=2.0, high_step=0.05,
    ),
    "figure 11, 32k tokens: BAPO": bapo("bapo", tokens=2**15, high_end=3.0),
    "figure 11, 32k tokens: GRPO": bapo("grpo", tokens=2**15, eps_low=0.2, eps_high=0.2),
    "figure 11, 32k tokens: clip-higher": bapo("grpo", tokens=2**15, eps_low=0.2, eps_high=0.28),
    "figure 8, each batch twice: BAPO": bapo("bapo"),
    "figure 2, each batch twice: GRPO": bapo("grpo"),
    "figure 2, table 2: GRPO": bapo("grpo", eps_low=0.2, eps_high=0.2),
    "figure 2, on-policy GRPO": bapo("grpo", (0, 0)),
    "figure 12, partial rollouts: BAPO": replace(bapo("bapo"), updates=800),
    "figure 12, partial rollouts: GRPO": replace(bapo("grpo"), updates=800),
    "M2PO's setting, on-policy": m2po("m2po", (0, 0)),
    "mu-GRPO's setting, on-policy": mu_grpo("grpo", (0, 0)),
    "MinPRO's setting, S = 4": minpro("minpro", 120, 32, (0, 3)),
    "MinPRO's setting, S = 4, 14B": minpro("minpro", 160, 16, (0, 3)),
    "Prefix-Ratio GRPO's setting, on-policy": prefix("prefix_ratio_grpo", (0, 0)),
    "Prefix-Ratio GRPO's setting, S = 4": prefix("prefix_ratio_grpo", (0, 3)),
    "BAPO's setting, S = 4": bapo("bapo", (0, 3)),
}  # fmt: skip


def rows():
    """(name, command, models, updates, lags) of each row with a command in the tables of README.md."""
    found = []
    for line in (EXAMPLES / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[1].startswith("`megarl "):
            name, command, models, updates, lags = cells
            found.append((name, command.strip("`"), models.split(), int(updates), tuple(map(int, lags.split("-")))))
    return found


ROWS = rows()
RUNS = [(name, command.replace("MODEL", model)) for name, command, models, *_ in ROWS for model in models]
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


def after_warm_up(schedule, lags):
    """``lags`` without those of the first updates, which train data of the first policy for lack of a later one."""
    if schedule.kind == "staged" or not (schedule.delay or schedule.colocate):
        return lags
    if len(lags) <= schedule.lag_rule.max_lag + 1:
        return lags  # all of them
    return lags[schedule.lag_rule.max_lag + 1 :]


def test_the_readme_has_the_rows_of_the_papers_with_their_updates_and_lags():
    names = [name for name, *_ in ROWS]
    assert Counter(names) == Counter(list(PAPERS))
    for name, _, _, updates, lags in ROWS:
        assert (updates, lags) == (PAPERS[name].updates, PAPERS[name].lags)


@pytest.mark.parametrize(("name", "command"), TRAINED, ids=[f"{c.split()[2].split('/')[1]}: {n}" for n, c in TRAINED])
def test_a_row_has_the_papers_numbers(name, command):
    check_numbers(recipe_of(command), PAPERS[name])


@pytest.mark.parametrize(("name", "command"), REBATCHED)
def test_a_row_on_fixed_rollouts_has_the_papers_numbers(tmp_path, name, command):
    (fixed,) = (recipe_of(command) for name, command in TRAINED if name == "table 4, fixed data, batch 32")
    words = shlex.split(command)
    assert words[:7] == ["megarl", "optimize", "FIXED", "--stage", "0", "--output", "RUN"] and set(words[7::2]) == {
        "--set"
    }
    stage = RunDir.create(tmp_path / "run", fixed).stage(0)
    for path in (stage.policy, stage.rollouts):
        path.mkdir(parents=True)
    check_numbers(branch_recipe(stage, words[8::2]), PAPERS[name])


def check_numbers(recipe, paper):
    schedule, rollout = recipe.schedule, recipe.rollout
    lags = lags_of(recipe)
    later = after_warm_up(schedule, lags)
    assert len(lags) == schedule.total_updates == paper.updates
    assert (min(later), max(later)) == paper.lags and max(lags) <= paper.lags[1]
    assert set(later) == set(range(paper.lags[0], paper.lags[1] + 1))
    assert (schedule.prompts_per_update, rollout.responses_per_prompt) == (paper.prompts, paper.responses)
    context = 4096 if recipe.model.path.name == "Qwen2.5-Math-7B" else paper.context
    assert recipe.data.max_prompt_tokens + rollout.max_response_tokens == context
    assert recipe.optimizer.lr == paper.lr
    objective = recipe.objective.model_dump()
    assert {key: objective[key] for key in paper.objective} == paper.objective
    if paper.evaluated_every:
        evaluated = [n for n in range(schedule.total_updates) if recipe.is_evaluated(n)]
        assert evaluated == list(range(0, schedule.total_updates, paper.evaluated_every))
    assert recipe.is_evaluated(0) and recipe.is_evaluated(schedule.total_updates) and recipe.eval.best == paper.best
    suites = dict(paper.suites)
    if recipe.model.path.name.startswith("OctoThinker"):  # table 2 of BAPO
        suites["math500"] = 16
    elif paper.lr == 2e-6 and len(recipe.suites) == 4:
        suites |= {"amc23": 16, "olympiad": 16}  # table 3 of BAPO, with DeepSeek-R1-Distill-Qwen-7B
    assert {suite.name: suite.samples for suite in recipe.suites} == suites
    assert {(suite.temperature, suite.top_p) for suite in recipe.suites} == {(paper.temperature, paper.top_p)}


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
