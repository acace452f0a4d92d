"""Updates of a small model in bfloat16 on the GPUs compared with float32 on the CPU: gradient, losses, gradient norms.

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
from tests.gpu.steps import is_installed
from tests.rehearsal.forks import in_fork
from tests.rehearsal.updates import Case, Distance, Outcome, outcome_of, seal

SMALL = ("kernels cuda", "transformer_engine", "EP2")
TORCH = {"kernels": "torch", "layers": "torch"}
ACTORS = {f"kernels {kernels}": {"kernels": kernels} for kernels in ("torch", "triton", "cuda")}
ACTORS |= {"recompute": {"kernels": "torch", "recompute": "full"}}
ACTORS |= {"transformer_engine": {"kernels": "torch", "layers": "transformer_engine"}}
# families beside Qwen3-MoE, the model of all other cases; some have only torch-native layers
FAMILIES = {family: {"kernels": "torch"} for family in ("qwen3", "glm4_moe")}
FAMILIES |= dict.fromkeys(("olmoe", "deepseek_v3", "qwen3_next", "gpt_oss"), TORCH)


def cases(gpus: int) -> dict[str, Case]:
    found = {name: Case(actor=actor) for name, actor in ACTORS.items()}
    found |= {family: Case(actor=actor, family=family) for family, actor in FAMILIES.items()}
    found |= {name: Case(layout, actor=TORCH) for name, layout in LAYOUTS.items() if 1 < layout.ranks <= gpus}
    # a GPU's memory is as large as it is, and so are its kernels' tiles
    return {name: replace(case, many_pieces=False) for name, case in found.items()}


def lacks(name: str) -> str | None:
    from megarl.kernels.library import find_library, triton_lacks

    if name == "kernels cuda" and not find_library("cuda"):
        return "the CUDA kernels are neither installed nor built"
    if name == "transformer_engine" and not is_installed("transformer-engine"):
        return "transformer_engine not installed"
    return triton_lacks() if name == "kernels triton" else None


@contextlib.contextmanager
def waits() -> Iterator[list[str]]:
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
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    failed, right = False, dict[str, Outcome]()
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-") as folder:
        for title, case in cases(options.gpus).items():
            if options.small and title not in SMALL:
                continue
            try:
                said = lacks(title)
                said = f"skipped: {said}" if said else compare(case, Path(folder), right)
            except Exception:
                said = f"FAILED\n{traceback.format_exc()}"
            failed |= said.startswith(("FAILED", "WRONG"))
            print(f"{title:<20}{said}", flush=True)
    sys.exit(failed)


def compare(case: Case, folder: Path, right: dict[str, Outcome]) -> str:
    sealed = folder / case.family
    if case.family not in right:
        sealed.mkdir(exist_ok=True)
        in_fork(lambda: seal(case.family, sealed))
        right[case.family] = outcome_of(Case(actor={"kernels": "torch"}, family=case.family), "cpu", sealed)
    ours = outcome_of(case, "cuda", sealed, waits)
    distance = Distance.between(ours, right[case.family])
    loss, norm = (max(abs(a - b) for a, b in pairs) for pairs in (distance.losses, distance.norms))
    return (
        f"{'right' if distance.tolerable() else 'WRONG'}: gradient {distance.gradient:.4f} of its length, loss "
        f"{loss:.1e} nats, norm {norm:.1e} off; waits per update {list(map(len, ours.seen))}"
    )


if __name__ == "__main__":
    main()
