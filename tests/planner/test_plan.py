"""`megarl plan`: parameters as Megatron counts them, plans of all examples, and alternatives to what does not fit."""

import itertools
import json
import re
import shlex
from dataclasses import replace

import pytest

from megarl.cli import main
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.planner.assumptions import GIB
from megarl.planner.fit import Fit, alternatives, make_plan
from megarl.planner.plan import MARGIN, Plan
from megarl.planner.sizes import GPUS
from megarl.planner.table import memory, table
from megarl.recipe.load import load_recipe, override_recipe
from tests.helpers import ROOT, refused
from tests.planner.simulated import EXAMPLES, MOE, PUBLISHED, staged
from tests.recipe.test_examples import TRAINED

FUSED = ["actor.layers=transformer_engine"]
FP8 = [*FUSED, "megatron.fp8=e4m3", "megatron.fp8_recipe=mxfp8"]
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


def test_only_adapters_have_optimizer_state_and_checkpoints(moe_plan, plan_of):
    """Adapters of rank 16, with tensor 4 and expert 8 on 32 GPUs, counted by hand."""
    plan, without = moe_plan(4, changes=["actor.lora.rank=16"]), moe_plan(4)
    # A of query, key and value, and B of the output, are on every tensor-parallel rank
    qkv, output = 16 * (2048 + 5120 / 4), 16 * (4096 / 4 + 2048)
    expert = 16 * (2048 + 2 * 768) + 16 * (768 + 2048)
    (stage,) = plan.stages
    assert (stage.dense_adapters, stage.expert_adapters) == (48 * (qkv + output), 48 * 16 * expert)
    ours, theirs = plan.optimize, without.optimize
    owned = 12 * (stage.dense_adapters / 8 + stage.expert_adapters / 4)
    assert ours["optimizer, fp32 master and two moments"] == owned
    assert ours["activations"] == theirs["activations"]
    whole = 48 * (16 * (2048 + 5120) + 16 * (4096 + 2048) + 128 * expert)
    assert plan.disk["one checkpoint"] == 14 * whole
    assert plan.disk["one export"] == without.disk["one export"]
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
    assert plan.misfit() is None and "warning" not in table(plan)
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
        (["rollout.memory_fraction=0.2585"], "h200", "KV cache of a rollout engine"),
        (["rollout.workers=8"], "h200", "rollout.workers * rollout.tensor_parallel = 16 GPUs a node"),
        (["rollout.engine=sglang", "rollout.memory_fraction=0.92"], "h100", "memory_fraction = 0.92: SGLang's share"),
        (["rollout.engine=sglang", "rollout.memory_fraction=0.88"], "h100", "None"),
    ],
)
def test_the_first_misfit_is_named(moe_plan, changes, gpu, first):
    assert first in str(moe_plan(2, gpu, changes).misfit())


def test_a_warning_names_as_many_groups_as_the_kv_cache_holds(moe_plan):
    def said(groups):
        engines = ["rollout.tensor_parallel=2", "rollout.workers=4"]
        plan = moe_plan(4, "h100", [f"rollout.groups_per_chunk={groups}", *engines])
        return "\n".join(memory(plan)), plan

    text, plan = said(1000)
    (groups,) = map(int, re.findall(r"rollout.groups_per_chunk=(\d+) fills it", text))
    cached, samples = plan.mean_sequence - plan.mean_response / 2, plan.recipe.rollout.responses_per_prompt
    assert "do not fit in the cache together" in text and groups > 1
    assert (groups - 1) * samples * cached < plan.kv_tokens <= groups * samples * cached
    text, fitting = said(groups)
    assert "warning" not in text
    assert fitting.rollout_seconds <= plan.rollout_seconds  # logits of fewer responses leave more room to the cache


def test_parts_of_layers_are_recomputed_before_whole_ones(counter, moe_plan):
    """On two nodes of 80 GB GPUs no layout fits without recompute."""
    plan = moe_plan(2, "h100", ["actor.recompute=none"])
    found = list(itertools.islice(alternatives(plan, counter), 2))
    assert [changes[-1] for changes in found] == ['actor.recompute=["layernorm", "moe"]'] * 2
    for changes in found:
        layout = [change for change in changes if "recompute" not in change]
        assert moe_plan(2, "h100", ["actor.recompute=none", *layout]).misfit() is not None
        again = moe_plan(2, "h100", [*layout, changes[-1]])
        full = moe_plan(2, "h100", [*layout, "actor.recompute=full"])
        assert again.misfit() is None and again.update_seconds() < full.update_seconds()
        assert "recompute layernorm, moe" in table(again)
    text = Fit("", plan, found).text()
    assert '--set \'actor.recompute=["layernorm", "moe"]\'' in text  # quoted for a shell


def test_alternatives_divide_a_prime_number_of_layers_into_unequal_stages(counter, plan_of):
    none = ["actor.recompute=none", "actor.tokens_per_micro_batch=16384"]
    plan = plan_of(DEEPSEEK, 32, changes=none)
    assert plan.misfit().startswith("optimize phase, activations: ")
    found = next(iter(alternatives(plan, counter)))
    ends = [f"megatron.num_layers_in_{end}_pipeline_stage={n}" for end, n in (("first", 30), ("last", 31))]
    assert "actor.pipeline_parallel=2" in found and found[-2:] == ends
    again = plan_of(DEEPSEEK, 32, changes=[*none, *found])
    assert again.misfit() is None and [stage.layers for stage in again.stages] == [30, 31]


def test_deepseek_v3_does_not_fit_on_gpus_of_80_gb(counter, plan_of):
    """Its trainers fit, but engines do not even with 8-bit weights."""
    plan = plan_of(DEEPSEEK, 32, "h100", ["actor.recompute=full"])
    assert plan.optimize_misfit() is None and plan.misfit().startswith("weights of a rollout engine: ")
    assert list(alternatives(plan, counter)) == []
    assert [stage.layers for stage in plan.stages] == [6, *[8] * 6, 7]
    most = max(range(8), key=lambda stage: sum(plan.optimize_stage(stage).values()))
    assert plan.optimize == plan.optimize_stage(most)
    wide = override_recipe(plan.recipe, ["rollout.vllm={}"])
    said = [replace(plan, recipe=r).engine_weights(plan.parameters) / GIB for r in (wide, plan.recipe)]
    said.append(8 * GPUS["h100"].memory / GIB)
    for text in (DEEPSEEK.read_text(), (EXAMPLES / "README.md").read_text()):
        assert all(f"{round(size)} GiB" in text.replace("\n# ", " ").replace("\n", " ") for size in said)
    assert plan_of(DEEPSEEK, 32, "h200", ["rollout.vllm={}"]).rollout_misfit() is not None


def test_the_optimizer_on_the_host_is_the_last_alternative(counter, moe_plan):
    """30 B parameters on four GPUs; with 52 GiB each, gradients shrink, too."""
    few = ["actor.processes_per_node=4", "rollout.workers=2", "actor.expert_parallel=4"]
    plan = moe_plan(gpu="a100", changes=few)
    assert "optimizer, fp32 master and two moments: 85.4 GiB" in plan.misfit()
    first = next(iter(alternatives(plan, counter)))
    own = ("use_precision_aware_optimizer=true", "optimizer_cpu_offload=true", "optimizer_offload_fraction=1.0")
    assert first[-3:] == [f"megatron_optimizer.{setting}" for setting in own]
    again = moe_plan(gpu="a100", changes=[*few, *first])
    assert again.misfit() is None and again.host["optimizer"] > 450 * GIB
    # where even that is too much, gradients become bfloat16
    smaller = replace(plan, hbm=52 * GIB)
    found = next(iter(alternatives(smaller, counter)))
    assert found[-4:] == [*first[-3:], "megatron_ddp.grad_reduce_in_fp32=false"]
    assert replace(moe_plan(gpu="a100", changes=[*few, *found]), hbm=52 * GIB).misfit() is None
    # a setting that the recipe has itself is not proposed
    decided = [*few, "megatron_optimizer.use_precision_aware_optimizer=false"]
    assert list(alternatives(moe_plan(gpu="a100", changes=decided), counter)) == []


def test_figures_of_scale_md_on_memory_recomputation_and_fp8(moe_plan):
    document = (EXAMPLES.parent / "docs/scale.md").read_text()
    for said in ('"none"', '["layernorm"]', '["moe"]', '["layernorm", "moe"]', '"full"'):
        plan = moe_plan(4, "h100", [f"actor.recompute={said}"])
        fits = "" if plan.misfit() is None else ", which does not fit"
        kept, beside = (plan.optimize[name] / GIB for name in ("activations", BESIDE))
        assert f"| `{said}` | {kept:.1f} + {beside:.1f}{fits} | {plan.update_seconds():.1f} |" in document
    fp8 = moe_plan(4, "h100", [*FUSED, "megatron.fp8=hybrid", "megatron.fp8_recipe=blockwise"])
    assert fp8.stages[0].matrices == 48 * (1280 * 2048 + 1024 * 2048)  # of a rank, with tensor 4
    assert f"copies are {fp8.optimize['weights, fp8 and transposed'] / GIB:.1f} GiB" in document.replace("\n", " ")
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
    *_, problem, one, two = refused(*command, *large).splitlines()
    assert problem.startswith("does not fit: optimize phase, activations: ")
    assert one.startswith("  this fits: --set actor.tensor_parallel=") and two.startswith("  this fits: --set ")


@pytest.mark.usefixtures("shared_counter")
def test_json_has_misfits_and_alternatives(capsys):
    refused("plan", EXAMPLES / "llama3_2_3b/mu_grpo.toml", "--json", "--set", "rollout.workers=16")
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == PUBLISHED["llama3_2_3b"]
    assert found["misfit"].startswith("rollout.workers * rollout.tensor_parallel = 16 GPUs a node")
    assert found["alternatives"] == [["rollout.tensor_parallel=1", "rollout.workers=8"]]


def test_devices_that_trainers_and_engines_share(counter, plan_of):
    shared = plan_of(MOE)
    assert shared.misfit() is None and not shared.overlaps
    assert shared.left_to_engines == shared.usable - sum(shared.optimize.values())
    full = plan_of(MOE, changes=["rollout.memory_fraction=0.9"])
    assert full.misfit().startswith("schedule.colocate: engines have 125.8 GiB of a GPU, but trainers, which stay in ")
    assert list(alternatives(full, counter)) == []
    less = float(re.search(r"lower rollout.memory_fraction by (0\.\d\d)", full.misfit())[1])
    again = plan_of(MOE, changes=[f"rollout.memory_fraction={0.9 - less}"])
    assert again.misfit() is None and MARGIN - 0.006 <= again.margin < MARGIN + 0.006
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
        (MOE, 1, "a100", FP8, "--gpu a100 cannot multiply in 8 bits"),
        (MOE, 1, "h200", FP8, "'mxfp8' needs a GPU from Blackwell on"),
        (DEEPSEEK, 32, "h200", ['actor.recompute=["mla_up_proj"]'], "'mla_up_proj': latent attention is megarl's own"),
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
    seconds = 28 * owned * 8 / plan.assume.host_bandwidth + 6 * owned / plan.assume.link
    assert plan.host_seconds == pytest.approx(seconds)
    assert re.search(r"host memory\n  optimizer +455\.54\n  checkpoint, pinned +113\.74\n", table(plan))
    half = plan_of(path, gpu="h100", changes=["megatron_optimizer.optimizer_offload_fraction=0.5"])
    assert half.optimize[name] == 0.5 * 12 * owned and half.host["optimizer"] == 0.5 * 16 * owned * 8
    narrow = [f"megatron_optimizer.{moment}_dtype='bfloat16'" for moment in ("exp_avg", "exp_avg_sq")]
    aware = plan_of(path, gpu="h100", changes=[*narrow, "megatron_optimizer.optimizer_cpu_offload=false"])
    assert aware.optimize[name] == 8 * owned and aware.host["optimizer"] == 0
    plain = plan_of(MOE.parent / "mu_grpo.toml", gpu="h100")
    assert plain.usable - sum(plain.optimize.values()) < GIB < 0.05 * (plan.usable - sum(plan.optimize.values()))


def test_less_than_three_hundredths_of_memory_are_a_warning(moe_plan):
    plan = moe_plan()
    for free, warns in ((0.029, True), (0.031, False)):
        more = (1 - free) * plan.usable - sum(plan.optimize.values())
        tight = replace(plan, assume=replace(plan.assume, runtime_bytes=plan.assume.runtime_bytes + more))
        assert tight.margin == pytest.approx(free)
        assert ("warning: 2.9% of it are left; what is not counted" in table(tight)) is warns
