"""For tests alone: ``python -m sglang.launch_server`` where three things of its deterministic mode ask for a GPU.

The processes that it spawns import this file as their main module, and so have the same three.
"""

import os
import pkgutil
import sys
from importlib.util import find_spec

# before SGLang reads it: importing the two hundred other models takes longer than all else
MODELS = ("deepseek_v2", "glm4_moe", "llama", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
everything = [
    module.name for module in pkgutil.iter_modules([f"{find_spec('sglang').submodule_search_locations[0]}/srt/models"])
]
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(name for name in everything if name not in MODELS)

from sglang.srt import batch_invariant_ops  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402

# seeds are heeded in deterministic mode alone, which no attention backend of the CPU is admitted to
choices.add_deterministic_attention_backend_choices(["torch_native"])
choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
# Triton's matmuls, for results that do not depend on the batch
batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None
# page-locks the host's buffer of routed experts
common._cuda_host_register = lambda *_, **__: None

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
