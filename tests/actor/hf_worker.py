"""One rank of `test_hf_layouts`: loads every model in each of its layouts (`families`) and exports it again.

Each layout loads what the layout before it exported, so a model goes from layout to layout. The memory that loading and
exporting need besides the parameters is written to ``results/``, for each layout, model and rank.
"""

import ctypes
import json
from pathlib import Path

from tests.actor import layout_ranks
from tests.extent import few

WORLD = 4  # processes; a layout with fewer ranks uses the first ones
MOE = ("qwen3_moe_fused", "qwen3_moe_single", "qwen3_moe_large_fused")
# families with other names of tensors and other ways to divide them; only in the layouts that divide most tensors
OTHERS = (
    "mixtral", "olmoe", "qwen2_moe", "glm4_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "qwen3_5_moe",
    "glm4_moe_lite", "minimax_m2",
)  # fmt: skip
OTHER_LAYOUTS = ("TP2 EP2", "PP2 VPP2", "PP2 uneven")
DENSE = ("qwen3", "qwen3_tied", "qwen2", "qwen2_tied", "llama", "llama_tied", "qwen3_5")
CHAIN = (
    "one", "TP2 ETP2", "TP2 EP2", "PP2", "CP2", "EP2", "DP2", "PP2 VPP2", "PP2 uneven", "TP2 PP2", "TP2 EP4",
    "TP2 EP2 ETP2", "CP2 PP2", "DP2 EP2",
)  # fmt: skip
TAKEN = few(CHAIN, "one", "TP2 EP2", "PP2 VPP2", "TP2 EP2 ETP2")
LAYOUTS = {**layout_ranks.LAYOUTS, "TP2 EP2 ETP2": layout_ranks.Layout(4, {"tensor_parallel": 2, "expert_parallel": 2})}


def families(layout: str) -> tuple[str, ...]:
    """The models that go through a layout; through one with expert parallelism, only those that have experts."""
    known = MOE if "expert_parallel" in LAYOUTS[layout].actor else MOE + DENSE
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

    from megarl.actor import parallel

    give_freed_blocks_back()
    sources = {name: root / "models" / name for name in MOE + DENSE + OTHERS}
    for layout in TAKEN:
        ranks = LAYOUTS[layout].ranks
        if rank < ranks:
            store = dist.FileStore(str(root / f"store {layout}"), ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
            parallel.build_groups(layout_ranks.recipe_of(LAYOUTS[layout], sources["qwen3"]))
            for name in families(layout):
                result = round_trip(sources[name], root / "exports" / layout / name, layout)
                (root / "results" / f"{layout}-{name}-{rank}.json").write_text(json.dumps(result))
            mpu.destroy_model_parallel()
            dist.destroy_process_group()
        for name in families(layout):
            sources[name] = root / "exports" / layout / name


def round_trip(source: Path, target: Path, layout: str) -> dict[str, int]:
    from megarl.actor.hf import export_hf, load_hf
    from megarl.actor.model import build_model
    from megarl.models.hf_config import read_hf_config

    models = build_model(read_hf_config(source), layout_ranks.recipe_of(LAYOUTS[layout], source))
    assert len(models) == (2 if layout == "PP2 VPP2" else 1)
    return {
        "load": peak_memory(lambda: load_hf(models, source)),
        "export": peak_memory(lambda: export_hf(models, target, like=source, version=3)),
    }
