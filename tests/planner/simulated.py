"""Plans whose parameters are not counted by Megatron: for times, the numbers in `PUBLISHED` are enough."""

from megarl.models.hf_config import read_hf_config
from megarl.planner.assumptions import Assumptions
from megarl.planner.parameter_counts import StageParameters
from megarl.planner.plan import Plan
from megarl.recipe.layout import Layout
from megarl.recipe.load import load_recipe, override_recipe
from megarl.recipe.tables import Recipe
from tests.planner.moe import EXAMPLES
from tests.planner.test_plan import PUBLISHED


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
    return plan_of_recipe(override_recipe(recipe, [*first, *changes]), path, gpu, nodes, assume)


def plan_of_recipe(recipe: Recipe, path: str, gpu: str, nodes: int, assume: Assumptions | None) -> Plan:
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
