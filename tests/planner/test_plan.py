"""`megarl plan`: parameters as Megatron counts them, plans of all examples, and layouts that fit instead."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from megarl.cli import main
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.planner.assumptions import GIB
from megarl.planner.fit import layouts_that_fit, make_plan
from megarl.planner.plan import Plan
from megarl.planner.sizes import GPUS
from megarl.planner.table import table
from megarl.recipe.load import load_recipe, override_recipe
from tests.helpers import ROOT, refused
from tests.planner.simulated import EXAMPLES, MOE, PUBLISHED, staged
from tests.recipe.test_examples import TRAINED

DEEPSEEK, QUICKSTART = EXAMPLES / "deepseek_v3/mu_grpo.toml", EXAMPLES / "quickstart/recipe.toml"
RECIPES = sorted(EXAMPLES.glob("*_*/*.toml"))
BESIDE = "backward pass of a layer, or of log-probs"
# parameters that a token uses, in table 1 of the model card (arXiv 2508.10925)
ACTIVE = {"gpt_oss_20b": 3.61e9, "gpt_oss_120b": 5.13e9}


def nodes_of(path):
    """(nodes, GPUs a node, GPU) in the last table of examples/README.md, by recipe or folder, else of "all others"."""
    name, lines = f"{path.parent.name}/{path.name}", (EXAMPLES / "README.md").read_text().splitlines()
    table = dict(re.findall(r"^\| (.*) \| (\d+ x \d+ H[12]00) \|$", "\n".join(lines), re.MULTILINE))
    others = table.pop("all others")
    said = [gpus for names, gpus in table.items() if f"`{name}`" in names or f"`{path.parent.name}/*.toml`" in names]
    nodes, gpus, gpu = re.fullmatch(r"(\d+) x (\d+) (\w+)", (said or [others])[0]).groups()
    return int(nodes), int(gpus), gpu.lower()


@pytest.fixture
def plan_of(counter):
    def plan_of(path, nodes=1, gpu="h200", changes=(), load=load_recipe):
        return Plan.of(override_recipe(load(path), changes), read_hf_config(path.parent), nodes, gpu, counter)

    return plan_of


@pytest.fixture
def moe_plan(plan_of):
    """The plan of ``path`` as a staged run; by default of MinPRO's recipe for Qwen3-30B-A3B."""
    return lambda nodes=1, gpu="h200", changes=(), path=MOE: plan_of(path, nodes, gpu, changes, staged)


def test_a_layout_that_cannot_be_built_is_reported(counter):
    hf, recipe = read_hf_config(MOE.parent), staged()
    with pytest.raises(UserError, match="^Megatron-Core cannot build this layout: .*Error: .*not divisible by"):
        counter.count(hf, recipe, 33)
    assert len(counter.count(hf, recipe, 32)) == 1


def test_only_adapters_are_in_checkpoints(moe_plan, plan_of):
    """Adapters of rank 16, with tensor 4 and expert 8 on 32 GPUs, counted by hand; `test_allocated` has Adam's."""
    plan, without = moe_plan(4, changes=["actor.lora.rank=16"]), moe_plan(4)
    # A of query, key and value, and B of the output, are on every tensor-parallel rank
    qkv, output = 16 * (2048 + 5120 / 4), 16 * (4096 / 4 + 2048)
    expert = 16 * (2048 + 2 * 768) + 16 * (768 + 2048)
    (stage,) = plan.stages
    assert (stage.dense_adapters, stage.expert_adapters) == (48 * (qkv + output), 48 * 16 * expert)
    assert plan.optimize["activations"] == without.optimize["activations"]
    whole = 48 * (16 * (2048 + 5120) + 16 * (4096 + 2048) + 128 * expert)
    assert plan.disk["one checkpoint"] == 14 * whole
    assert plan.disk["one policy"] == without.disk["one policy"]
    # forward, recompute, and one of the two passes of backward
    assert plan.update_seconds() == pytest.approx(without.update_seconds() * 3 / 4)
    assert f"and {stage.adapters / 1e6:.1f} M of adapters" in table(plan)
    small = plan_of(MOE.parent / "mu_grpo-lora.toml", 1, "h100")
    total = sum(small.optimize.values()) / GIB
    assert f"| {total:.1f} of 75.1 |" in (EXAMPLES.parent / "docs/scale.md").read_text()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_examples_have_the_published_parameters_and_fit_their_gpus(plan_of, path):
    nodes, gpus, gpu = nodes_of(path)
    plan = plan_of(path, nodes, gpu)
    assert plan.recipe.objective.name == path.stem.partition("-")[0]
    assert plan.parameters == PUBLISHED[path.parent.name]
    if active := ACTIVE.get(path.parent.name):
        assert plan.active_parameters == pytest.approx(active, rel=5e-3)
    assert plan.recipe.devices_per_node == gpus
    assert plan.misfit() is None
    assert plan.longest_sequence <= plan.hf["max_position_embeddings"]
    assert plan.kv_tokens > 8 * plan.longest_sequence


def test_rows_fit_the_gpus_of_examples_readme(plan_of):
    misfits = {}
    for _, command in TRAINED:
        words = shlex.split(command)
        nodes, _, gpu = nodes_of(path := ROOT / words[2])
        misfits[command] = plan_of(path, nodes, gpu, words[6::2]).misfit()
    assert {command: misfit for command, misfit in misfits.items() if misfit} == {}


@pytest.mark.parametrize(
    ("changes", "gpu", "first"),
    [
        (["actor.recompute=none"], "h100", "optimize phase, activations: "),
        (["rollout.memory_fraction=0.15"], "h200", "weights of a rollout engine"),
        (["rollout.memory_fraction=0.25"], "h200", "KV cache of a rollout engine"),
        (["rollout.workers=8"], "h200", "rollout.workers * rollout.tensor_parallel = 16 GPUs a node"),
        (["rollout.engine=sglang", "rollout.memory_fraction=0.93"], "h100", "memory_fraction = 0.93: SGLang's share"),
        (["rollout.engine=sglang", "rollout.memory_fraction=0.92"], "h100", "None"),
    ],
)
def test_the_first_misfit_is_named(moe_plan, changes, gpu, first):
    assert first in str(moe_plan(2, gpu, changes).misfit())


def test_deepseek_v3_does_not_fit_on_gpus_of_80_gb(plan_of):
    """Its trainers fit, but engines do not even with 8-bit weights."""
    plan = plan_of(DEEPSEEK, 32, "h100", ["actor.recompute=full"])
    assert plan.optimize_misfit() is None and plan.misfit().startswith("weights of a rollout engine: ")
    assert [stage.layers for stage in plan.stages] == [6, *[8] * 6, 7]
    most = max(range(8), key=lambda stage: sum(plan.optimize_stage(stage).values()))
    assert plan.optimize == plan.optimize_stage(most)
    wide = override_recipe(plan.recipe, ["rollout.vllm={}"])
    said = [replace(plan, recipe=r).engine_weights(plan.parameters) / GIB for r in (wide, plan.recipe)]
    said.append(8 * GPUS["h100"].memory / GIB)
    for text in (DEEPSEEK.read_text(), (EXAMPLES / "README.md").read_text()):
        assert all(f"{round(size)} GiB" in text.replace("\n# ", " ").replace("\n", " ") for size in said)
    assert plan_of(DEEPSEEK, 32, "h200", ["rollout.vllm={}"]).rollout_misfit() is not None


def test_layouts_that_fit_come_first_with_the_settings_of_the_recipe(counter, moe_plan):
    """On four nodes of 80 GB GPUs some do without recompute, on two none."""
    for nodes, changed in ((4, "actor.expert_tensor_parallel=1"), (2, "actor.recompute=full")):
        plan = moe_plan(nodes, "h100", ["actor.recompute=none", "actor.tokens_per_micro_batch=22528"])
        assert plan.misfit().startswith("optimize phase, ")
        found = next(layouts_that_fit(plan, counter))
        assert found[-1] == changed
        again = ["actor.recompute=none", "actor.tokens_per_micro_batch=22528", *found]
        assert moe_plan(nodes, "h100", again).misfit() is None


def test_figures_of_scale_md_on_memory_and_recomputation(moe_plan):
    document = (EXAMPLES.parent / "docs/scale.md").read_text()
    for said in ('"none"', '["layernorm"]', '["moe"]', '["layernorm", "moe"]', '"full"'):
        plan = moe_plan(4, "h100", [f"actor.recompute={said}"])
        fits = "" if plan.misfit() is None else ", which does not fit"
        kept, beside = (plan.optimize[name] / GIB for name in ("activations", BESIDE))
        assert f"| `{said}` | {kept:.1f} + {beside:.1f}{fits} | {plan.update_seconds():.1f} |" in document
    for nodes in (1, 4):
        items = moe_plan(nodes).optimize
        row = [size / GIB for size in items.values() if size][1:]
        total = sum(items.values()) / GIB
        assert f"| {nodes} x 8 H200 | {' | '.join(f'{size:.1f}' for size in row)} | {total:.1f} of 132.8 |" in document


def test_objective_and_nodes_change_memory_and_passes(moe_plan):
    plain = moe_plan()
    reference = moe_plan(changes=["objective.kl.coefficient=0.1"])
    assert (plain.frozen, reference.frozen) == (0, 1)
    assert reference.optimize["frozen policies, bf16"] == plain.optimize["weights, bf16"]
    assert moe_plan(path=MOE.with_name("m2po.toml")).extra_passes == plain.extra_passes + 1
    proximal = ["objective.name=decoupled_ppo", "objective.aggregation=token_mean", "objective.proximal_updates=4"]
    assert moe_plan(changes=proximal).extra_passes == 3 / 4  # all updates of a step but the first
    four = moe_plan(nodes=4)
    name = "optimizer, fp32 master and two moments"
    assert four.optimize[name] == plain.optimize[name] / 4


@pytest.mark.usefixtures("shared_counter")
def test_command_line(capsys):
    command = ["plan", str(EXAMPLES / "llama3_2_3b/mu_grpo.toml")]
    main([*command, "--nodes", "2", "--gpu", "H200"])
    assert "llama, 3.21 B parameters; 2 x 8 h200" in capsys.readouterr().out
    large = ("--set", "actor.recompute=none", "--set", "actor.tokens_per_micro_batch=65536")
    *_, problem, layout = refused(*command, *large).splitlines()
    assert problem.startswith("does not fit: optimize phase, activations: ")
    assert layout.startswith("  this fits: --set actor.tensor_parallel=")


@pytest.mark.usefixtures("shared_counter")
def test_json_has_the_misfit(capsys):
    refused("plan", EXAMPLES / "llama3_2_3b/mu_grpo.toml", "--json", "--set", "rollout.workers=16")
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == PUBLISHED["llama3_2_3b"]
    assert found["misfit"].startswith("rollout.workers * rollout.tensor_parallel = 16 GPUs a node")
    assert found["alternative"] is None


def test_devices_that_trainers_and_engines_share(plan_of):
    shared = plan_of(MOE)
    assert shared.misfit() is None and not shared.overlaps
    assert shared.left_to_engines == shared.usable - sum(shared.optimize.values())
    full = plan_of(MOE, changes=["rollout.memory_fraction=0.9"])
    assert full.misfit().startswith("schedule.colocate: engines have 125.8 GiB of a GPU, but trainers, which stay in ")
    less = float(re.search(r"lower rollout.memory_fraction by (0\.\d\d\d)", full.misfit())[1])
    for more, fits in ((0.001, True), (-0.001, False)):
        again = plan_of(MOE, changes=[f"rollout.memory_fraction={0.9 - less - more}"])
        assert (again.misfit() is None) is fits
    apart = plan_of(MOE, changes=["rollout.memory_fraction=0.9", "schedule.colocate=false"])
    assert apart.misfit() is None
    assert "; 1 x 8 h200 of trainers, 1 x 8 of engines\n" in table(apart)


def test_time_of_a_live_stage(moe_plan, plan_of):
    apart = ["schedule.colocate=false"]
    both_wait = [*apart, "schedule.delay=0", "schedule.lockstep=true"]
    turns, beside, lockstep = (plan_of(MOE, 4, changes=changes) for changes in ([], apart, both_wait))
    once = moe_plan(4, "h100", ["rollout.tensor_parallel=4", "rollout.workers=2"])  # 8 replicas
    assert once.seconds["load of the engines"] == pytest.approx(120 + 2 * PUBLISHED["qwen3_30b_a3b"] * 8 / 2e9)
    load, rollouts, *training = beside.seconds.values()
    assert beside.stage_seconds == max(load + rollouts, sum(training))
    for plan in (turns, lockstep):
        assert plan.stage_seconds == pytest.approx(sum(plan.seconds.values()))
    read = 2 * PUBLISHED["qwen3_30b_a3b"] * 16 / 2e9  # 16 replicas read the weights
    assert beside.seconds["10 loads of the engines"] == pytest.approx(120 + 10 * read)
    # engines sleep between turns, so they start once
    assert turns.seconds["10 loads of the engines"] == pytest.approx(120 + 10 * read)
    assert {"10 loads of the engines", "10 exports"} <= beside.seconds.keys()  # a version every 16 of 160 updates


@pytest.mark.parametrize(
    ("path", "nodes", "gpu", "changes", "message"),
    [
        (MOE, 1, "h900", (), "--gpu h900: known are a100, h100, h200, h20, b200"),
        (MOE, 0, "h200", (), "--nodes 0: at least 1"),
        (QUICKSTART, 1, "h200", (), "backend=cuda"),
        (DEEPSEEK, 32, "h200", ['actor.recompute=["moe_act"]'], "'moe_act': only Transformer Engine's experts"),
        (QUICKSTART, 1, "h200", ["actor.backend=cuda", "model.path=/none"], r"put its config\.json beside the recipe"),
    ],
)
def test_wrong_options_and_settings_are_refused(path, nodes, gpu, changes, message):
    with pytest.raises(UserError, match=message):
        make_plan(path, nodes, gpu, changes)


def test_30b_on_one_node_of_80_gb_with_its_optimizer_on_the_host(plan_of):
    """Of all 3,623,878,656 parameters of a rank's experts, and of half of its others, which one other rank has too."""
    path = MOE.parent / "mu_grpo-one_node.toml"
    plan = plan_of(path, gpu="h100")
    assert plan.misfit() is None
    owned = 3_623_878_656 + 394_868_736 / 2
    name = "optimizer, fp32 master and two moments"
    # master weights, moments and gradients; a process that writes a checkpoint keeps the first two as they were
    host = {"optimizer": 16 * owned * 8, "optimizer, as it is written": 12 * owned * 8}
    host["checkpoint, pinned"] = 4 * PUBLISHED["qwen3_30b_a3b"]  # weights alone, at most doubled
    assert plan.optimize[name] == 0 and plan.host == host
    assert re.search(r"host memory\n  optimizer +455\.54\n  checkpoint, pinned +113\.74\n", table(plan))
    half = plan_of(path, gpu="h100", changes=["megatron_optimizer.optimizer_offload_fraction=0.5"])
    assert half.optimize[name] == 0.5 * 12 * owned and half.host["optimizer"] == 0.5 * 16 * owned * 8
    plain = plan_of(MOE.parent / "mu_grpo.toml", gpu="h100")
    assert plain.usable - sum(plain.optimize.values()) < GIB < 0.05 * (plan.usable - sum(plan.optimize.values()))
