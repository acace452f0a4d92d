"""The rollout engines and verifiers that a recipe can name, and the module of each.

To add one, write its module and add one line here. Modules are not imported here, because an engine's take seconds.
"""

from __future__ import annotations

# [rollout] engine: module with the functions of `megarl.rollout.engine.EngineModule`
ENGINES = {
    "builtin": "megarl.rollout.builtin",
    "vllm": "megarl.rollout.vllm",
    "sglang": "megarl.rollout.sglang.engine",
}

# [reward] kind: module with the functions of `megarl.rewards.VerifierModule`
VERIFIERS = {
    "reasoning_gym": "megarl.rewards.reasoning_gym",
    "exact": "megarl.rewards.exact",
    "math": "megarl.rewards.math",
    "code": "megarl.rewards.code",
    "python": "megarl.rewards.python",
    "judge": "megarl.rewards.service",
    "http": "megarl.rewards.service",
}
