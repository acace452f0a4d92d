"""One rank of `test_hf_layouts`: loads every model in each of its layouts (`families`) and exports it again.

Each layout loads what the layout before it exported, so a model goes from layout to layout. The memory that loading and
exporting need besides the parameters is written to ``results/``, for each layout, model and rank.
"""

import ctypes
import json
from pathlib import Path

from tests.extent import few

WORLD = 4  # processes; a layout with fewer ranks uses the first ones
MOE = ("qwen3_moe_fused", "qwen3_moe_single", "qwen3_moe_large_fused")
# families with other names of tensors and other ways to divide them; only in the layouts that divide most tensors
OTHERS = ("mixtral", "olmoe", "qwen2_moe", "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "qwen3_5_moe")
OTHER_LAYOUTS = ("tp2_ep2", "pp2_vpp2", "pp2_uneven")
DENSE = ("qwen3", "qwen3_tied", "qwen2", "qwen2_tied", "llama", "llama_tied")
LAYOUTS = {  # name: ranks, settings of [actor]
    "one": (1, {}),
    "tp2_etp2": (2, {"tensor_parallel": 2}),
    "tp2_ep2": (2, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "ep2": (2, {"expert_parallel": 2}),
    "dp2": (2, {}),
    "pp2_vpp2": (2, {"pipeline_parallel": 2}),
    "pp2_uneven": (2, {"pipeline_parallel": 2}),
    "tp2_pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2_ep4": (4, {"tensor_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 1}),
    "tp2_ep2_etp2": (4, {"tensor_parallel": 2, "expert_parallel": 2}),
    "cp2_pp2": (4, {"context_parallel": 2, "pipeline_parallel": 2}),
    "dp2_ep2": (4, {"expert_parallel": 2}),
}
TAKEN = few(LAYOUTS, "one", "tp2_ep2", "pp2_vpp2", "tp2_ep2_etp2")

MEGATRON = {
    "pp2_vpp2": {"virtual_pipeline_model_parallel_size": 2},
    "pp2_uneven": {"num_layers_in_last_pipeline_stage": 1},
}


def families(layout: str) -> tuple[str, ...]:
    """The models that go through a layout; through one with expert parallelism, only those that have experts."""
    known = MOE if "expert_parallel" in LAYOUTS[layout][1] else MOE + DENSE
    return known + OTHERS if layout in OTHER_LAYOUTS else known


def peak_memory(function) -> int:
    """Bytes of resident memory at the peak of ``function``, beyond those that were resident before."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    function()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def give_freed_blocks_back() -> None:
    """Make malloc return freed blocks to the system at once, since `peak_memory` measures resident memory."""
    m_mmap_threshold, m_arena_max = -3, -8  # malloc.h
    libc = ctypes.CDLL(None)
    assert libc.mallopt(m_mmap_threshold, 65536) and libc.mallopt(m_arena_max, 2)


def main(rank: int, root: Path) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    give_freed_blocks_back()
    sources = {name: root / "models" / name for name in MOE + DENSE + OTHERS}
    for layout in TAKEN:
        ranks, table = LAYOUTS[layout]
        if rank < ranks:
            store = dist.FileStore(str(root / f"store_{layout}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            mpu.initialize_model_parallel(
                table.get("tensor_parallel", 1),
                table.get("pipeline_parallel", 1),
                2 if layout == "pp2_vpp2" else None,
                context_parallel_size=table.get("context_parallel", 1),
                expert_model_parallel_size=table.get("expert_parallel", 1),
                expert_tensor_parallel_size=table.get("expert_tensor_parallel", table.get("tensor_parallel", 1)),
            )
            model_parallel_cuda_manual_seed(0)
            for name in families(layout):
                result = round_trip(sources[name], root / "exports" / layout / name, layout, table)
                (root / "results" / f"{layout}-{name}-{rank}.json").write_text(json.dumps(result))
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
        for name in families(layout):
            sources[name] = root / "exports" / layout / name


def round_trip(source: Path, target: Path, layout: str, table: dict[str, int]) -> dict[str, int]:
    from megarl.actor.hf import export_hf, load_hf
    from megarl.actor.model import build_model
    from megarl.models.hf_config import read_hf_config
    from tests.actor.conftest import make_recipe

    megatron = MEGATRON.get(layout, {})
    models = build_model(read_hf_config(source), make_recipe(source, actor=table, megatron=megatron))
    assert len(models) == (2 if layout == "pp2_vpp2" else 1)
    if layout == "pp2_uneven":
        assert len(models[0].decoder.layers) in (1, 3)
    return {
        "load": peak_memory(lambda: load_hf(models, source)),
        "export": peak_memory(lambda: export_hf(models, target, like=source, version=3)),
    }
