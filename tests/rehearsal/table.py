"""Waits and launches of an update on the rehearsal device, and what one layer adds to them; docs/kernels.md has them.

PYTHONPATH=tests/rehearsal/site .venv/bin/python -m tests.rehearsal.table
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.actor.conftest import make_hf_model
from tests.actor.layout_ranks import Layout, seal_rollouts
from tests.rehearsal.counts import counted
from tests.rehearsal.forks import in_fork, in_ranks
from tests.rehearsal.updates import Case, run_updates

MODELS = {
    "dense": {"family": "qwen3"},
    "MoE, 4 experts": {"family": "qwen3_moe"},
    "MoE, 16 experts": {"family": "qwen3_moe", "num_experts": 16},
}
LAYOUTS = {
    "one rank": Layout(1),
    "2 ranks, expert parallel": Layout(2, {"expert_parallel": 2}),
}


def measure(layers: int, layout: Layout, family: str, **shape: int) -> tuple[int, int, int]:
    """(waits, launches, micro-batches) of the third update on the first rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def seal() -> None:
            model = make_hf_model(family, num_hidden_layers=layers, initializer_range=0.1, **shape)
            model.bfloat16().float().save_pretrained(folder / "model")
            seal_rollouts(model, folder / "rollouts")

        in_fork(seal)
        case = Case(layout, actor={"kernels": "torch"})
        ranks = in_ranks(
            lambda rank: run_updates(rank, case, "cuda", folder / "model", folder / "rollouts", folder, counted),
            layout.ranks,
        )
    seen = ranks[0].seen[-1]
    return seen.waits.total(), seen.launch_count, ranks[0].micro_batches


def main() -> None:
    print("model, layout | waits an update | launches an update | waits a layer | launches a layer | micro-batches")
    for name, shape in MODELS.items():
        for where, layout in LAYOUTS.items():
            if shape["family"] == "qwen3" and layout.ranks > 1:
                continue
            less, more = (measure(layers, layout, **shape) for layers in (2, 4))
            waits, launches = ((more[i] - less[i]) / 2 / more[2] for i in (0, 1))
            print(f"{name}, {where} | {more[0]} | {more[1]} | {waits:g} | {launches:g} | {more[2]}", flush=True)


if __name__ == "__main__":
    main()
