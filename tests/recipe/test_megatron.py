"""Tables of a recipe for Megatron-Core are checked, against its source too, before anything starts."""

import pytest

from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.recipe.megatron import CONFIGS, fields
from megarl.recipe.optimizer import check_optimizer
from tests.actor.conftest import make_recipe


def test_known_fields_with_values_of_the_right_types_are_accepted(recipe):
    given = ["megatron.recompute_modules=['core_attn']", "megatron.moe_router_topk_scaling_factor=2"]
    given += ["megatron_ddp.bucket_size=1000", "megatron_optimizer.decoupled_weight_decay=false"]
    loaded = load_recipe(recipe, given)
    assert loaded.megatron_ddp == {"bucket_size": 1000}
    assert loaded.megatron_optimizer == {"decoupled_weight_decay": False}


def test_the_known_fields_are_those_of_megatrons_dataclasses():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    for table, config in zip(CONFIGS, classes, strict=True):
        assert set(fields(table)) == set(config.__dataclass_fields__)


AWARE = {"use_precision_aware_optimizer": True}
HOST = AWARE | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"decoupled_lr": 1e-7}, "decoupled_lr = 1e-07: all parameters have one learning rate"),
        ({"clip_grad": 2.0}, r"clip_grad = 2.0: set it in \[optimizer\] instead"),
        ({"main_params_dtype": "float16"}, "main_params_dtype = float16: megarl keeps master weights and"),
        (AWARE | {"store_param_remainders": True}, "checkpoints hold whole master weights"),
        (HOST | {"exp_avg_dtype": "bfloat16"}, "exp_avg_dtype = bfloat16: megarl keeps master weights and moments in"),
        ({"optimizer_cpu_offload": True}, "without use_precision_aware_optimizer = true master weights would stay"),
        (HOST | {"optimizer_offload_fraction": 0.0}, "set optimizer_offload_fraction, the share"),
        (AWARE, "use_precision_aware_optimizer = true: it is supported only with optimizer_cpu_offload"),
    ],
)
def test_settings_that_megarl_does_not_support_are_refused(table, message):
    with pytest.raises(UserError, match=message):
        check_optimizer(make_recipe(megatron_optimizer=table, actor={"backend": "cuda"}))


def test_the_cpu_has_no_other_memory_for_the_optimizer():
    with pytest.raises(UserError, match=r'optimizer_cpu_offload = true: needs \[actor\] backend = "cuda"'):
        check_optimizer(make_recipe(megatron_optimizer=HOST))


def test_the_optimizer_may_be_on_the_host():
    check_optimizer(make_recipe(megatron_optimizer=HOST, actor={"backend": "cuda"}))
