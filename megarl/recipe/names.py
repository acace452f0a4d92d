"""The rollout engines and verifiers that a recipe can name, and the module of each.

To add one, write its module and add one line here; an engine's keys stand in `megarl.recipe.rollout_table`. Modules are
not imported here, because an engine's take seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """What megarl knows about a rollout engine beside its code.

    module: has the functions of `megarl.rollout.engine.EngineModule`.
    title: its name in messages.
    takes: bytes that it takes of a GPU with so many, if ``rollout.memory_fraction`` is not set.
    share_of_cache: ``rollout.memory_fraction`` is the share of weights and KV cache alone, not of the whole engine.
    """

    module: str
    title: str = ""
    takes: Callable[[float], float] = lambda memory: 0.92 * memory  # as vLLM 0.32 does
    share_of_cache: bool = False


# [rollout] engine
ENGINES = {
    "builtin": Engine("megarl.rollout.builtin"),
    "vllm": Engine("megarl.rollout.vllm"),
    "sglang": Engine(
        "megarl.rollout.sglang.engine",
        title="SGLang",
        takes=lambda memory: memory - 10 * 2**30,  # SGLang 0.5.23, on GPUs of more than 60 GiB
        share_of_cache=True,
    ),
}

# [reward] kind: module with the functions of `megarl.rewards.VerifierModule`
VERIFIERS = {
    "reasoning_gym": "megarl.rewards.reasoning_gym",
    "exact": "megarl.rewards.exact",
    "math": "megarl.rewards.math",
    "dapo": "megarl.rewards.dapo",
    "prime_math": "megarl.rewards.prime_math",
    "qwen_math": "megarl.rewards.qwen_math",
    "code": "megarl.rewards.code",
    "python": "megarl.rewards.python",
    "judge": "megarl.rewards.service",
    "http": "megarl.rewards.service",
}

# they compare the responses to a prompt with each other
GROUP_ADVANTAGES = ("group_mean_std", "group_mean", "leave_one_out", "optimal")
ADVANTAGES = (*GROUP_ADVANTAGES, "batch_normalised")  # ``objective.advantage``: see `megarl.advantages`
