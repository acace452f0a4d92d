"""Fused routers, which Megatron-Core imports and uses only with ``moe_router_fusion``."""


def fused_topk_with_score_function(
    logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias
): ...


def fused_compute_score_for_moe_aux_loss(logits, topk, score_function): ...


def fused_moe_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff): ...
