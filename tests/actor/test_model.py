"""What importing the actor's model gives Megatron-Core, on every backend."""

import pytest
import torch

from tests.actor.test_step import build, make_samples, update


def test_the_router_multiplies_in_float32_without_transformer_engine():
    """As on GPUs, where the weights are bfloat16 and ``moe_router_dtype`` is float32."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    import megarl.actor.model  # noqa: F401 - defines what Megatron-Core imports from Transformer Engine alone

    tokens, weight = (torch.randn(n, 8).bfloat16().requires_grad_() for n in (5, 4))
    logits = router_gating_linear(tokens, weight, None, torch.float32)
    logits.backward(torch.ones_like(logits))
    assert torch.equal(logits, tokens.float() @ weight.float().t())
    assert torch.equal(weight.grad, tokens.float().sum(0).expand(4, 8).bfloat16())
    assert tokens.grad.dtype == torch.bfloat16


@pytest.mark.usefixtures("one_rank")
def test_norms_are_recomputed_without_a_compiler(saved_model, monkeypatch):
    """Megatron-Core 0.19 has a C++ extension for it, which it compiles in the first backward pass."""
    monkeypatch.setattr("megatron.core.tensor_parallel.random.load_inline", None, raising=False)
    stored, recomputed = (
        update(build(saved_model("qwen3"), actor={"recompute": parts}), make_samples())
        for parts in ("none", ["layernorm"])
    )
    assert recomputed["grad_norm"] == pytest.approx(stored["grad_norm"], rel=1e-6)


@pytest.mark.usefixtures("one_rank")
def test_fused_functions_are_not_compiled_on_a_cpu_even_if_they_were_imported_before():
    """Compiling one takes as long as several updates of a small model."""
    from megatron.core.transformer.moe.router import TopKRouter

    assert not hasattr(TopKRouter._apply_expert_bias, "_torchdynamo_orig_callable")
