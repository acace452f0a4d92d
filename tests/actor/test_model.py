"""What importing the actor's model gives Megatron-Core, on every backend."""

import torch


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
