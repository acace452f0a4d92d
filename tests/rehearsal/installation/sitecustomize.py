"""As `../site`, but with flashinfer, and with an engine that starts as vLLM's does on a GPU.

Each process that initialises CUDA adds its rank and the variables that CUDA and torch read then to the file
MEGARL_TEST_CUDA.
"""

import json
import os
from typing import Any

from tests.rehearsal import hooks

NAMES = ("RANK", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF")


def _after_torch(torch: Any, before: Any = hooks.AFTER["torch"]) -> None:
    before(torch)
    initialise = torch._C._cuda_init

    def noting() -> None:
        with open(os.environ["MEGARL_TEST_CUDA"], "a") as file:
            file.write(json.dumps([os.environ.get(name) for name in NAMES]) + "\n")
        initialise()

    torch._C._cuda_init = noting


def _after_builtin(builtin: Any) -> None:
    from megarl.rollout import vllm
    from megarl.rollout.continuous import Settings

    def build(recipe: Any, stage: int, policy_dir: Any, version: int, routed_experts: bool) -> Any:
        vllm._prepare_process(Settings("cuda", context=1, responses=1))
        import flashinfer  # noqa: F401

        return builtin.BuiltinEngine(policy_dir, version, "cuda:0")

    builtin.build = build


hooks.AFTER |= {"torch": _after_torch, "megarl.rollout.builtin": _after_builtin}
