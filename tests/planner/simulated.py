"""Plans whose parameters are not counted by Megatron: for times, the numbers in `PUBLISHED` are enough."""

from pathlib import Path

from megarl.models.hf_config import read_hf_config
from megarl.planner.assumptions import Assumptions
from megarl.planner.parameter_counts import StageParameters
from megarl.planner.plan import Plan
from megarl.recipe.layout import Layout
from megarl.recipe.load import load_recipe, override_recipe
from megarl.recipe.tables import Recipe, ScheduleTable
from tests.helpers import ROOT

EXAMPLES = ROOT / "examples"
MOE = EXAMPLES / "qwen3_30b_a3b/minpro.toml"

GPT_OSS_ATTENTION = 2 * 2880 * 4096 + 2 * 2880 * 512 + 4096 + 2 * 512 + 2880 + 64
GPT_OSS_EXPERT = 2880 * 5760 + 5760 + 2880 * 2880 + 2880 + 2880 + 1  # and its row of the router
PUBLISHED = {  # parameters in the models' safetensors files, or counted by hand
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    **dict.fromkeys(("qwen2_5_math_7b", "qwen2_5_coder_7b", "deepseek_7b"), 7_615_616_512),
    **dict.fromkeys(("qwen2_5_32b", "deepseek_32b"), 32_763_876_352),
    **dict.fromkeys(("llama3_2_3b", "octothinker_3b"), 3_212_749_824),
    # by hand, without the multi-token prediction layer: embedding and head; attention with biases and two norms
    # in 46 layers; one dense layer; a shared expert, 128 others and their router in the rest; final norm
    "glm_4_5_air": 2 * 151_552 * 4096
    + 46 * (2 * 4096 * 12_288 + 2 * 4096 * 1024 + 12_288 + 2 * 1024 + 2 * 4096)
    + 3 * 4096 * 10_944
    + 45 * (129 * 3 * 4096 * 1408 + 128 * 4096)
    + 4096,
    # likewise: 36 layers of gated delta nets (projections in, of decay and gate, out; convolution; decay, norm), 12 of
    # attention with an output gate; a shared expert with a gate, 512 others, their router and two norms in each
    "qwen3_next_80b_a3b": 2 * 151_936 * 2048
    + 36 * (2048 * (2 * 2048 + 2 * 4096) + 2048 * 64 + 4096 * 2048 + 4 * 8192 + 2 * 32 + 128)
    + 12 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048 + 2 * 256)
    + 48 * (513 * 3 * 2048 * 512 + 512 * 2048 + 2048 + 2 * 2048)
    + 2048,
    # likewise: latent attention (queries down and up, keys and values down and up, output, norms) in 61 layers, three
    # of them dense; a shared expert, 256 others and their router in the rest
    "deepseek_v3": 2 * 129_280 * 7168
    + 61 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512 + 2 * 7168)
    + 3 * 3 * 7168 * 18_432
    + 58 * (257 * 3 * 7168 * 2048 + 256 * 7168)
    + 7168,
    # likewise: attention with biases and sinks, 32 or 128 experts and their router with biases, two norms in each layer
    "gpt_oss_20b": 2 * 201_088 * 2880 + 24 * (GPT_OSS_ATTENTION + 32 * GPT_OSS_EXPERT + 2 * 2880) + 2880,
    "gpt_oss_120b": 2 * 201_088 * 2880 + 36 * (GPT_OSS_ATTENTION + 128 * GPT_OSS_EXPERT + 2 * 2880) + 2880,
}


def plan_of(
    path: str,
    devices: int,
    gpu: str = "h200",
    nodes: int = 1,
    assume: Assumptions | None = None,
    changes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a recipe, ``path`` below examples/, with ``devices`` GPUs a node for trainers and for engines."""
    recipe = load_recipe(EXAMPLES / path)
    tensor = next((int(c.partition("=")[2]) for c in changes if c.startswith("rollout.tensor_parallel")), 1)
    first = [f"actor.processes_per_node={devices}", f"rollout.workers={devices // tensor}"]
    first += ["actor.recompute=full", "actor.tokens_per_micro_batch=16384", "rollout.groups_per_chunk=128"]
    recipe = override_recipe(recipe, [*first, *changes])
    hf, layout = read_hf_config((EXAMPLES / path).parent), Layout.of(recipe, nodes * recipe.actor.processes_per_node)
    total = PUBLISHED[path.partition("/")[0]]
    experts = 0
    if hf["num_experts"]:
        experts = hf["num_hidden_layers"] * hf["num_experts"] * 3 * hf["hidden_size"] * hf["moe_intermediate_size"]
    split, pipeline = layout.expert_parallel * layout.expert_tensor_parallel, layout.pipeline_parallel
    dense = (total - experts) // layout.tensor_parallel // pipeline
    stage = StageParameters(hf["num_hidden_layers"] // pipeline, dense, experts // split // pipeline)
    whole = StageParameters(hf["num_hidden_layers"], total - experts, experts)
    return Plan(recipe, hf, nodes, gpu, layout, whole, [stage] * pipeline, assume or Assumptions())


def staged(path: Path = MOE) -> Recipe:
    """The recipe with 40 stages of 48 updates, a checkpoint per stage, and the engine's defaults."""
    recipe = load_recipe(path)
    schedule = ScheduleTable(stages=40, updates_per_stage=48, prompts_per_update=recipe.schedule.prompts_per_update)
    rollout = recipe.rollout.model_copy(update={"memory_fraction": None, "groups_per_chunk": 128})
    actor = recipe.actor.model_copy(update={"checkpoint_every": 48})
    return recipe.model_copy(update={"schedule": schedule, "rollout": rollout, "actor": actor})
