"""An engine is added with a module, here this one, and a line of `ENGINES`."""

from dataclasses import replace

from megarl.recipe.names import ENGINES, Engine
from megarl.rollout import build_engine
from megarl.rollout.builtin import BuiltinEngine
from tests.rollout.engines import generate, sampling, stage_recipe


class ShortEngine(BuiltinEngine):
    """Ends every response after three tokens."""

    def submit(self, number, request):
        super().submit(number, replace(request, sampling=replace(request.sampling, budget=3)))


def build(recipe, stage, policy_dir, version, routed_experts):
    return ShortEngine(policy_dir, version)


def test_an_engine_is_one_module_and_one_line(moe_dir, monkeypatch):
    monkeypatch.setitem(ENGINES, "short", Engine(__name__, options=False))
    recipe = stage_recipe("short", model={"path": str(moe_dir)})
    completions = generate(build_engine(recipe, 0, moe_dir, 0), [[8]], sampling([[8]], tokens=12))
    assert [len(one.tokens) for one in completions.values()] == [3, 3, 3]
