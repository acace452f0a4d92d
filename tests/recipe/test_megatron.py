"""The tables of a recipe that go to Megatron-Core are checked against its source before anything starts."""

import pytest

from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.recipe.megatron import CONFIGS, fields


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("megatron.moe_router_topk_scaling_facto=1.0", "did you mean 'moe_router_topk_scaling_factor'"),
        ("megatron_ddp.overlap_grad_reduce=1", "overlap_grad_reduce = 1: Megatron-Core expects a value of type bool"),
        ("megatron_ddp.bucket_size=true", r"bucket_size = True: Megatron-Core expects a value of type Optional\[int\]"),
        ("megatron_optimizer.exp_avg_dtype=bf16", "exp_avg_dtype = 'bf16': Megatron-Core expects a value of type"),
    ],
)
def test_unknown_fields_and_values_of_wrong_types_are_named(recipe, setting, message):
    with pytest.raises(UserError, match=message):
        load_recipe(recipe, [setting])


def test_known_fields_with_values_of_the_right_types_are_accepted(recipe):
    given = ["megatron.recompute_modules=['core_attn']", "megatron.moe_router_topk_scaling_factor=2"]
    given += ["megatron_ddp.bucket_size=1000", "megatron_optimizer.exp_avg_dtype=bfloat16"]
    loaded = load_recipe(recipe, given)
    assert loaded.megatron_ddp == {"bucket_size": 1000}
    assert loaded.megatron_optimizer == {"exp_avg_dtype": "bfloat16"}


def test_the_known_fields_are_those_of_megatrons_dataclasses():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    for table, config in zip(CONFIGS, classes, strict=True):
        assert set(fields(table)) == set(config.__dataclass_fields__)
