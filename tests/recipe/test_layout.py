"""Parallel layouts that cannot work are refused, with the reason."""

import re

import pytest

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.recipe.layout import Layout, check_layout
from megarl.recipe.load import override_recipe
from tests.actor.conftest import make_recipe
from tests.helpers import ROOT

MOE, DENSE = (read_hf_config(ROOT / f"examples/{name}") for name in ("qwen3_30b_a3b", "qwen3_8b"))
VIRTUAL = "megatron.virtual_pipeline_model_parallel_size"
FIRST, LAST = (f"megatron.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


def check(hf, settings=""):
    """settings: of [actor], or of another table that is named, each as after --set."""
    full = [setting if "." in setting.partition("=")[0] else f"actor.{setting}" for setting in settings.split()]
    check_layout(override_recipe(make_recipe(), full), hf)


def test_sensible_layouts_pass():
    check(MOE, "processes_per_node=8 tensor_parallel=4 expert_parallel=8 expert_tensor_parallel=1")
    check(MOE, "processes_per_node=8 tensor_parallel=2 pipeline_parallel=2 context_parallel=2")
    check(DENSE, "processes_per_node=8 tensor_parallel=4")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # Megatron runs this one and leaves expert gradients unreduced
        ("2 tensor_parallel=2 expert_tensor_parallel=1", "unreduced"),
        ("8 tensor_parallel=8", "does not divide the model's num_key_value_heads = 4"),
        ("8 tensor_parallel=4 context_parallel=4", "= 16"),
        ("5 pipeline_parallel=5", "= 48; set [megatron] num_layers_in_first_pipeline_stage = 9 and num_layers_in_last"),
        ("3 expert_parallel=3", "expert_parallel = 3 does not divide the model's 128 experts"),
        (f"4 pipeline_parallel=4 {VIRTUAL}=5", "= 20"),
        (f"2 {VIRTUAL}=2", "needs pipeline_parallel > 1"),
        (f"1 {FIRST}=3", "= 3: pipeline_parallel = 1 makes only one stage"),
        (f"1 {LAST}=0", "num_layers_in_last_pipeline_stage = 0: must be at least 1"),
        (f"4 pipeline_parallel=4 {FIRST}=10", "= 10: the other 3 pipeline stages cannot share"),
        (f"4 pipeline_parallel=4 {FIRST}=6 {VIRTUAL}=4", "= 4 does not divide the layers of every pipeline stage, 6"),
        (f"2 pipeline_parallel=2 {FIRST}=20 {LAST}=28 {VIRTUAL}=4", "with virtual stages on two pipeline ranks set"),
        (f"4 pipeline_parallel=4 {VIRTUAL}=4 megatron.moe_router_bias_update_rate=1e-3", "the tokens that fill"),
        ("1 megatron.tensor_model_parallel_size=2", "[actor] tensor_parallel"),
        ("1 megatron.pipeline_model_parallel_layout=Et|tL", "use num_layers_in_first_pipeline_stage and"),
        ("1 megatron.calculate_per_token_loss=false", "wrong weights"),
    ],
)
def test_layouts_that_cannot_work_are_refused_with_the_reason(settings, words):
    """settings: processes a node, and others as above."""
    with pytest.raises(UserError, match=re.escape(words)):
        check(MOE, f"processes_per_node={settings}")


@pytest.mark.parametrize(
    ("stages", "ends", "expected"), [(1, (0, 0), [61]), (8, (6, 7), [6, *[8] * 6, 7]), (16, (0, 1), [*[4] * 15, 1])]
)
def test_pipeline_stages_get_the_layers_that_the_settings_say(stages, ends, expected):
    layout = Layout(stages, pipeline_parallel=stages, first_layers=ends[0], last_layers=ends[1])
    assert layout.stage_layers(61) == expected
    assert list(layout.problems(MOE | {"num_hidden_layers": 61})) == []
    assert [len(chunk) for chunk in layout.chunks(61)] == expected
    assert [layer for chunk in layout.chunks(61) for layer in chunk] == list(range(61))
    if stages in (8, 16) and all(ends):
        assert Layout(stages, pipeline_parallel=stages).balanced(61) == layout


def test_virtual_stages_get_their_layers_in_megatrons_order():
    layout = Layout(4, pipeline_parallel=4, virtual_stages=2, first_layers=6)
    assert list(layout.problems(MOE)) == []
    assert [len(chunk) for chunk in layout.chunks(48)] == [3, 7, 7, 7] * 2


def test_ranks_of_all_nodes_count_unless_the_number_of_nodes_is_unknown():
    recipe = make_recipe(actor={"processes_per_node": 8, "tensor_parallel": 4, "pipeline_parallel": 4})
    check_layout(recipe, MOE, nodes=2)
    check_layout(recipe, MOE, nodes=None)
    with pytest.raises(UserError, match=r"processes_per_node \* nodes = 24"):
        check_layout(recipe, MOE, nodes=3)
