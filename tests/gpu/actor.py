"""Updates of a small model in bfloat16 on the GPUs compared with float32 on the CPU: gradient, losses, gradient norms.

The cases are kernels, layers and model families, and with several GPUs also layouts of two and four ranks.
`tests/rehearsal/on_device/test_updates.py` does so on the rehearsal device; here the arithmetic is the GPU's own.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.actor.layout_ranks import LAYOUTS
from tests.gpu.steps import package
from tests.rehearsal.forks import in_fork
from tests.rehearsal.updates import Case, Distance, Outcome, outcome_of, seal

SMALL = ("kernels cuda", "transformer_engine", "EP2")
TORCH = {"kernels": "torch", "layers": "torch"}
# families beside Qwen3-MoE, the model of all other cases
FAMILIES = {"qwen3": {"kernels": "torch"}, "glm4_moe": {"kernels": "torch"}}
# these have only torch-native layers
FAMILIES |= dict.fromkeys(("olmoe", "deepseek_v3", "qwen3_next", "gpt_oss"), TORCH)


def cases(gpus: int) -> dict[str, Case]:
    """The cases that this number of GPUs allows, by name."""
    found = {f"kernels {kernels}": Case(actor={"kernels": kernels}) for kernels in ("torch", "triton", "cuda")}
    found |= {family: Case(actor=actor, family=family) for family, actor in FAMILIES.items()}
    found["recompute"] = Case(actor={"kernels": "torch", "recompute": "full"})
    found["transformer_engine"] = Case(actor={"kernels": "torch", "layers": "transformer_engine"})
    for name, layout in LAYOUTS.items():
        if 1 < layout.ranks <= gpus:
            found[name] = Case(layout, actor=TORCH)
    # a GPU's memory is as large as it is, and so are its kernels' tiles
    return {name: replace(case, many_pieces=False) for name, case in found.items()}


def lacks(name: str) -> str | None:
    """The reason to skip a case, or None."""
    if name == "kernels cuda":
        from megarl.kernels.library import find_library

        return None if find_library("cuda") else "the CUDA kernels are neither installed nor built"
    if name == "kernels triton":
        from megarl.kernels.library import triton_lacks

        return triton_lacks()
    return package("transformer_engine")() if name == "transformer_engine" else None


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
    """Collects torch's warnings of operations that waited for the device."""
    import torch

    found: list[str] = []
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    torch.cuda.set_sync_debug_mode("default")
    found += [text for warning in caught if "synchroniz" in (text := str(warning.message))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--cases", nargs="+", help="only these")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    chosen = options.cases or (SMALL if options.small else list(cases(options.gpus)))
    failed, right = 0, dict[str, Outcome]()
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-") as name:
        for title, case in cases(options.gpus).items():
            if title not in chosen:
                continue
            if reason := lacks(title):
                print(f"{title:<20}skipped: {reason}", flush=True)
                continue
            family, folder = case.family, Path(name) / case.family
            try:
                if family not in right:
                    folder.mkdir()
                    in_fork(lambda: seal(family, folder))  # noqa: B023 - called at once
                    right[family] = outcome_of(Case(actor={"kernels": "torch"}, family=family), "cpu", folder)
                ours = outcome_of(case, "cuda", folder, waits)
                distance = Distance.between(ours, right[family])
                loss, norm = (max(abs(a - b) for a, b in x) for x in (distance.losses, distance.norms))
                wrong = not distance.tolerable()
                print(
                    f"{title:<20}{'WRONG' if wrong else 'right'}: gradient {distance.gradient:.4f} of its length, loss "
                    f"{loss:.1e} nats, norm {norm:.1e} off; waits per update {list(map(len, ours.seen))}",
                    flush=True,
                )
                failed += wrong
            except Exception:
                failed += 1
                print(f"{title:<20}FAILED\n{traceback.format_exc()}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
