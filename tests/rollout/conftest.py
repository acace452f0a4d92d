import pytest

from megarl.rollout import build_engine, engine_module
from tests.helpers import children
from tests.rollout.engines import BOTH, CONTEXT, OWN_OPTION, TOGETHER, stage_recipe
from tests.rollout.tiny_models import save


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory):
    return save(tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """{family: directories of two models}, with heads of 32, the smallest of vLLM on a CPU."""
    folder = tmp_path_factory.mktemp("models")
    families = ("qwen3_moe", "qwen3")
    return {
        kind: [save(folder / kind / str(seed), kind, seed=seed, head_dim=32) for seed in (0, 1)] for kind in families
    }


@pytest.fixture(scope="session", params=BOTH)
def engine(request, models):
    """A running engine, started with the first model of a family as version 3. Tests may leave the other model in it.

    All tests that use this engine share it. After it is closed none of its processes may be left.
    """
    name, family = request.param
    model, before = models[family][0], children()
    experts = "cpu" in engine_module(name).RECORDS_EXPERTS and family == "qwen3_moe"
    recipe = stage_recipe(name, model={"path": str(model)}, rollout=OWN_OPTION)
    engine = build_engine(recipe, 0, model, 3, routed_experts=experts)
    if name != "builtin":
        assert (engine.settings.context, engine.settings.responses) == (CONTEXT, TOGETHER)
    own = children() - before
    yield engine
    own |= {process for parent in own if parent.is_running() for process in parent.children(recursive=True)}
    engine.close()
    assert not own & children()


@pytest.fixture
def name(request):
    """The name of the engine that the test runs on."""
    return request.node.callspec.params["engine"][0]


@pytest.fixture
def records_experts(request):
    """Whether the engine that the test runs on records the routed experts of its model."""
    engine, family = request.node.callspec.params["engine"]
    return "cpu" in engine_module(engine).RECORDS_EXPERTS and family == "qwen3_moe"
