"""For tests only: ``python -m sglang.launch_server`` without three parts of its deterministic mode that need a GPU.

The processes that it spawns import this file as their main module, so they have the same replacements.
"""

import os
import pkgutil
import sys
from importlib.util import find_spec

# must be set before SGLang is imported: importing its two hundred other models would take most of the time
MODELS = ("deepseek_v2", "glm4_moe", "llama", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
everything = [
    module.name for module in pkgutil.iter_modules([f"{find_spec('sglang').submodule_search_locations[0]}/srt/models"])
]
os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(name for name in everything if name not in MODELS)

from sglang.srt import batch_invariant_ops  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402

# SGLang uses seeds only in its deterministic mode, for which it allows no attention backend of the CPU
choices.add_deterministic_attention_backend_choices(["torch_native"])
choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
# else it would use Triton's matrix products, whose results do not depend on the batch
batch_invariant_ops.enable_batch_invariant_mode = lambda *_, **__: None
# else it would page-lock the host's buffer of routed experts, which needs CUDA
common._cuda_host_register = lambda *_, **__: None

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
