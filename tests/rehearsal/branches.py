"""Which branches that depend on sizes a rank takes, from the shapes of its model, in a recipe or in a rehearsal.

A size decides by a threshold: of Megatron-Core (the size of a bucket) or of megarl. `THRESHOLDS` has every constant of
megarl's actor and kernels that is one, with the value that makes tiny models take the branches of large ones;
`NOT_THRESHOLDS` has the others. `tests/rehearsal/test_branches.py` compares both with the source.

A test of `on_device/test_updates.py` compares those of each recipe in examples/ with those of all rehearsed updates.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megarl.recipe.layout import Layout

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in ROOT.glob("examples/*/*.toml") if 'backend = "cpu"' not in path.read_text())

THRESHOLDS = {
    "actor.hf.MAX_FILE_BYTES": 20_000,
    "actor.hf.BLOCK_BYTES": 256,
    "models.delta_net.CHUNK": 4,  # which `delta_rule.sequence_chunks` has as a default
    "kernels.token_pass.triton_backend.TILE": 8,
    "kernels.token_pass.triton_backend._STRETCH": 2,
}
MEMORY = 640_000  # bytes of the device; the head's buffer is a 64th of it
NOT_THRESHOLDS = {
    "actor.experts._ALIGNMENT": "16 bytes, of the kernel; `grouped_linear` pads, see tests/actor/test_experts.py",
    "actor.packing._KEYS": "a share of the budget; tests/actor/test_packing.py",
    "actor.packing._LEAST_SHARED": "a share of the tokens",
    "kernels.linear_logprob.torch_backend.CPU_BUFFER_BYTES": "of a CPU",
    "kernels.linear_logprob.torch_backend.CPU_BLOCK_BYTES": "of a CPU",
    "kernels.linear_logprob.triton_backend.GROUP": "an order of programs; tests/kernels/interpreted",
    "kernels.linear_logprob.triton_backend.WAVES": "of multiprocessors; tests/kernels/interpreted",
    "kernels.token_pass.triton_backend.WARPS": "threads of a program",
    "kernels.token_pass.triton_backend._ROW": "sums of a program",
    "kernels.token_pass.triton_backend.LAUNCH_OPTIONS": "options of the compiler",
    "kernels.weighted_glu.triton_backend.LAUNCH_OPTIONS": "options of the compiler",
    "kernels.row_sums.triton_backend.COLUMNS": "columns of a program; tests/kernels/interpreted",
    "kernels.row_sums.triton_backend.LAUNCH_OPTIONS": "options of the compiler",
    "kernels.library.ABI_VERSION": "of a library",
    "actor.step._LISTED": "length of a list in the metrics",
    "kernels.short_attention.LONGEST": "of a CPU",
    "kernels.constants.NEVER": "a mark",
    "kernels.constants.LAST_PLACE": "a limit of 2^22 sequences of 2^22 tokens",
    "kernels.constants.POSITION_BITS": "of the same limit",
    "kernels.constants.LIMB_BITS": "a format of numbers",
    "kernels.constants.HISTOGRAM_SHIFT": "a format of numbers",
    "kernels.constants.HISTOGRAM_BASE": "a format of numbers",
    "kernels.constants.BINS_PER_SIGN": "a format of numbers",
    "kernels.constants.BINS": "a format of numbers",
    "kernels.constants.SQUARE_SCALE": "a format of numbers",
    "kernels.constants.LARGEST_SQUARE": "a limit of values",
    "kernels.constants.LARGEST_CONTRIBUTION": "a limit of values",
}


@contextlib.contextmanager
def many_pieces() -> Iterator[None]:
    from megarl.actor import delta_rule
    from tests.rehearsal import device

    with contextlib.ExitStack() as stack:
        for name, value in THRESHOLDS.items():
            module, _, constant = name.rpartition(".")
            target = importlib.import_module(f"megarl.{module}")
            kind = type(getattr(target, constant))
            stack.enter_context(mock.patch.object(target, constant, kind(value)))
        size = THRESHOLDS["models.delta_net.CHUNK"]
        stack.enter_context(mock.patch.object(delta_rule.sequence_chunks, "__defaults__", (size,)))
        stack.enter_context(mock.patch.object(device, "TOTAL_MEMORY", MEMORY))
        yield


def branches(recipe: Any, models: list[Any], replicas: list[Any], longest: int, response: int) -> set[str]:
    """The branches that this rank takes. longest: tokens of the longest sequence, response: of the longest response."""
    return {
        *(found for number, replica in enumerate(replicas) for found in _of_buckets(replica, number)),
        *_of_head(recipe, models[-1]),
        *_of_files(models),
        *_of_sequences(recipe, models[0], longest, response),
    }


def _of_buckets(replica: Any, chunk: int) -> Iterator[str]:
    """Megatron-Core's bucket_size: `param_and_grad_buffer.py`."""
    names = {parameter: _short(name) for name, parameter in replica.module.named_parameters()}
    for kind, buffers in (("dense", replica.buffers), ("experts", replica.expert_parallel_buffers)):
        for buffer in buffers:
            yield f"{kind}: {'one bucket' if len(buffer.buckets) == 1 else 'several buckets'}"
            for bucket in buffer.buckets:
                yield f"{kind}: a bucket of {'one parameter' if len(bucket.params) == 1 else 'several parameters'}"
                if len(bucket.params) == 1:
                    yield f"alone in its bucket: {names[bucket.params_list[0]]}"
                share = bucket.grad_data.numel() // buffer.data_parallel_world_size
                for parameter in bucket.params if buffer.data_parallel_world_size > 1 else ():
                    first, last = bucket.param_to_index[parameter]
                    several = first // share != (last - 1) // share
                    yield f"{kind}: a parameter {'on several ranks' if several else 'on one rank'}"


def _short(name: str) -> str:
    return re.sub(r"^.*\.(?=\w+\.\w+$)", "", name)


def _of_head(recipe: Any, model: Any) -> Iterator[str]:
    if not model.post_process:
        return
    backend = recipe.actor.head_backend
    kernels = importlib.import_module(f"megarl.kernels.linear_logprob.{backend}_backend")
    rows = model.output_layer.output_size_per_partition
    tokens = recipe.actor.tokens_per_micro_batch // recipe.actor.context_parallel
    hidden = SimpleNamespace(
        shape=(tokens, model.config.hidden_size), dtype=torch.bfloat16, device=torch.device("cuda", 0)
    )
    chunk = kernels.chunk_tokens(hidden, rows)
    yield f"head, {backend}: {'one chunk' if chunk >= tokens else 'several chunks'}"
    padded = rows * recipe.actor.tensor_parallel > model.true_vocab_size
    yield f"head: the vocabulary is {'padded' if padded else 'divided evenly'}"


def _of_files(models: list[Any]) -> Iterator[str]:
    """BLOCK_BYTES and MAX_FILE_BYTES of `megarl.actor.hf`. A rank writes about as many bytes as it holds."""
    from megarl.actor import hf

    held = 0
    for tensor in hf.hf_tensors(models):
        row_bytes = 2 * math.prod(tensor.shape[1:]) * hf._sharing_group(tensor).size()
        rows = max(1, hf.BLOCK_BYTES // row_bytes)
        split = {None: "on all ranks", 0: "split by rows", 1: "split by columns"}[tensor.split]
        kind = "expert" if tensor.local_expert is not None else "tensor"
        kind = f"adapted {kind}" if tensor.low_rank else kind
        views = [view.shape[0] for view in tensor.views]
        yield f"{kind} {split}: {'one block' if max(views) <= rows else 'several blocks'}"
        if any(view > rows and view % rows for view in views):
            yield f"{kind}: a last block of fewer rows"
        size = 2 * math.prod(tensor.shape)
        held += size
        if size > hf.MAX_FILE_BYTES:
            yield "a tensor larger than a file"
    yield f"a rank's weights in {'one file' if held <= hf.MAX_FILE_BYTES else 'several files'}"


def _of_sequences(recipe: Any, model: Any, longest: int, response: int) -> Iterator[str]:
    """Tiles of the token pass, chunks of the delta rule, windows of attention, and the budget of a micro-batch.

    There are always short sequences too.
    """
    from megarl.actor.delta_rule import sequence_chunks
    from megarl.kernels.token_pass import triton_backend as token_pass

    if longest > recipe.actor.tokens_per_micro_batch:
        yield "a sequence beyond the budget of a micro-batch"
    if recipe.actor.kernel_backend == "triton":
        if response > token_pass.TILE:
            yield "token pass: several tiles"
        if response > token_pass.TILE * token_pass._STRETCH.value:
            yield "token pass: several stretches"
    if any("conv1d" in name for name, _ in model.named_parameters()):
        (size,) = sequence_chunks.__defaults__
        if longest > size:
            yield "delta rule: several chunks"
    if model.config.window_size and longest > model.config.window_size[0] + 1:
        yield "attention: beyond the window"


def branches_of_recipe(path: Path) -> set[str]:
    """Those of every pipeline stage's first rank, on the meta device. Patches Megatron-Core in this process."""
    from megatron.core import parallel_state as mpu
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.actor import cpu_backend, lora, parallel
    from megarl.actor.model import build_model
    from megarl.actor.optimizer import wrap
    from megarl.models.hf_config import read_hf_config
    from megarl.recipe.load import load_recipe

    cpu_backend.install(torch.device("meta"))
    meta = ["megatron.init_model_with_meta_device=true", "megatron.perform_initialization=false"]
    recipe, found = load_recipe(path, meta), set()
    response, stages = recipe.rollout.max_response_tokens, recipe.actor.pipeline_parallel
    # of the smallest number of whole nodes that the layout needs
    layout = Layout.of(recipe, 1)
    experts = layout.expert_parallel * layout.expert_tensor_parallel
    share = math.lcm(layout.tensor_parallel * layout.context_parallel, experts)
    ranks = math.lcm(recipe.actor.processes_per_node, share * stages)
    for stage in range(stages):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=stage * ranks // stages, world_size=ranks)
        parallel.build_groups(recipe, gloo=False)
        with torch.device("meta"):
            models = build_model(read_hf_config(path.parent), recipe)
            lora.attach(models, recipe)
            replicas, _ = wrap(models, recipe)
        found |= branches(recipe, models, replicas, recipe.data.max_prompt_tokens + response, response)
        mpu.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    return found


def of_all_recipes() -> dict[str, set[str]]:
    """{path of a recipe in examples/: its branches}. In a fork, since it patches Megatron-Core."""
    from tests.rehearsal.forks import in_fork

    return in_fork(lambda: {str(path.relative_to(ROOT)): branches_of_recipe(path) for path in RECIPES})
