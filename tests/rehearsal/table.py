"""Waits and launches of an update on the rehearsal device, and what one layer adds to them; docs/kernels.md has them.

PYTHONPATH=tests/rehearsal/site .venv/bin/python -m tests.rehearsal.table
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.actor.layout_ranks import LAYOUTS
from tests.rehearsal.counts import counted
from tests.rehearsal.forks import in_fork
from tests.rehearsal.updates import Case, outcome_of, seal

ROWS = [("dense", "qwen3", {}, "one")]
ROWS += [(f"MoE, {n} experts", "qwen3_moe", {"num_experts": n}, layout) for n in (4, 16) for layout in ("one", "EP2")]


def measure(layers: int, family: str, shape: dict[str, int], layout: str) -> tuple[int, int, int]:
    """(waits, launches, micro-batches) of the third update."""
    with tempfile.TemporaryDirectory() as folder:
        in_fork(lambda: seal(family, Path(folder), num_hidden_layers=layers, **shape))
        outcome = outcome_of(Case(LAYOUTS[layout], actor={"kernels": "torch"}), "cuda", Path(folder), counted)
    seen = outcome.seen[-1]
    return seen.waits.total(), seen.launch_count, outcome.micro_batches


def main() -> None:
    print("model, layout | waits an update | launches an update | waits a layer | launches a layer | micro-batches")
    for name, *model, layout in ROWS:
        less, more = (measure(layers, *model, layout) for layers in (2, 4))
        waits, launches = ((more[i] - less[i]) / 2 / more[2] for i in (0, 1))
        print(f"{name}, {layout} | {more[0]} | {more[1]} | {waits:g} | {launches:g} | {more[2]}", flush=True)


if __name__ == "__main__":
    main()
