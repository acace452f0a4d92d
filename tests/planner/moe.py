"""MinPRO's recipe for Qwen3-30B-A3B as a staged run, in which each phase has the GPUs to itself."""

from pathlib import Path

from megarl.recipe.load import load_recipe
from megarl.recipe.tables import Recipe, ScheduleTable

EXAMPLES = Path(__file__).parents[2] / "examples"
MOE = EXAMPLES / "qwen3_30b_a3b/minpro.toml"


def staged(path: Path = MOE) -> Recipe:
    """The recipe with 40 stages of 48 updates, a checkpoint per stage, and the engine's defaults."""
    recipe = load_recipe(path)
    schedule = ScheduleTable(stages=40, updates_per_stage=48, prompts_per_update=recipe.schedule.prompts_per_update)
    rollout = recipe.rollout.model_copy(update={"memory_fraction": None, "groups_per_chunk": 128})
    actor = recipe.actor.model_copy(update={"checkpoint_every": 48})
    return recipe.model_copy(update={"schedule": schedule, "rollout": rollout, "actor": actor})
