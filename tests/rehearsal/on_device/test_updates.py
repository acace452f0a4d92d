"""Updates with ``backend = "cuda"`` in bfloat16, in layouts of one to four ranks, compared with float32 on the CPU.

The tolerance is that of bfloat16: a rounding changes a number by at most 2^-9 of it, a gradient goes through some fifty
roundings in four layers, and independent roundings add up to one or two percent of its length.
"""

from __future__ import annotations

import gc
import hashlib
import pickle
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.actor.layout_ranks import FAMILIES as LAYOUTS_OF
from tests.actor.layout_ranks import LAYOUTS, MATRIX, TRAINED
from tests.extent import EVERY
from tests.rehearsal.branches import of_all_recipes
from tests.rehearsal.counts import counted
from tests.rehearsal.forks import in_fork
from tests.rehearsal.updates import EVERY_LAYOUT, LAYERS, Case, Distance, Outcome, fits, outcome_of, seal

OWN_WAITS = 2  # of megarl itself, per update
# at most, in an update of two micro-batches on one rank, with four MoE layers of four experts
WAITS, LAUNCHES = 2, 2000

TORCH = {"kernels": "torch"}
RESUMED = {"actor": TORCH, "updates": 2, "saved_after": 1}
# the moments that another optimizer reads from a checkpoint show in the second update after it
CHANGED = RESUMED | {"updates": 3}
# the layouts of the matrix; on GPUs all communication overlaps
SEVERAL = {name: Case(LAYOUTS[name], **RESUMED) for name in MATRIX if LAYOUTS[name].ranks > 1}
CASES = {
    **SEVERAL,
    "one": Case(actor=TORCH, many_pieces=False, bucket_size=None),
    "optimizer on the host": Case(**CHANGED, optimizer="host", others=("device", "half")),
    "optimizer of another": Case(LAYOUTS["DP2"], **CHANGED, others=("host",)),
    "EP2": Case(LAYOUTS["EP2"], **RESUMED, bucket_size=10_000),  # several buckets of several parameters
    "recompute": Case(LAYOUTS["TP2 EP2"], actor=TORCH | {"recompute": "full"}, updates=2, bucket_size=None),
    # the gradient alone: Triton's interpreter, which both need, is slow
    "cuda": Case(LAYOUTS["TP2 EP2"], actor={"kernels": "cuda"}, updates=0),
    # one micro-batch, for a head of several chunks
    "triton": Case(actor={"kernels": "triton", "tokens_per_micro_batch": 256}, updates=0),
}
# families with another kind of layer, each in the layouts for which its layers have their own code
PLAIN = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_tied")  # with no layers of their own


def layouts_of(family: str) -> Iterable[str]:
    if not EVERY:
        return ["TP2 EP2"]
    wanted = LAYOUTS if EVERY_LAYOUT else ("DP2", *(LAYOUTS_OF[family][0] if family in LAYOUTS_OF else ()))
    return [layout for layout in wanted if LAYOUTS[layout].ranks > 1 and fits(family, LAYOUTS[layout])]


FAMILIES = {
    f"{family} {layout}": Case(LAYOUTS[layout], family=family, **RESUMED)
    for family in (*TRAINED, *(PLAIN if EVERY else ()))
    for layout in layouts_of(family)
}
# these compute something else, so the CPU computes each of them too
CASES |= {
    "replay actor": Case(LAYOUTS["DP2"], actor=TORCH | {"routing_replay": "actor"}, updates=2),
    "replay engine": Case(
        LAYOUTS["TP2 ETP2"], actor=TORCH | {"routing_replay": "engine", "recompute": "full"}, updates=2
    ),
    **{
        scope: Case(
            objective="m2po", fields={"m2_threshold": 0.04}, actor={"statistics_scope": scope} | TORCH, updates=2
        )
        for scope in ("exact", "micro")
    },
    **FAMILIES,
    "adapters DP2": Case(LAYOUTS["DP2"], actor=TORCH | {"lora": {"rank": 3}}, updates=2, many_pieces=False),
    "adapters TP2 EP2": Case(LAYOUTS["TP2 EP2"], actor=TORCH | {"lora": {"rank": 3}}, updates=2),
}


# how much more than others some families magnify rounding, as transformers does in bfloat16
ROUNDING = {"qwen3_next": 2, "qwen3_5_moe": 2, "olmoe": 1.5}


@pytest.fixture(scope="module", autouse=True)
def imports():
    """Import the actor once, not in every fork."""
    import megarl.actor.checkpoint
    import megarl.actor.cpu_backend
    import megarl.actor.step
    import megarl.phases.optimize
    import megarl.phases.rehearse  # noqa: F401

    gc.freeze()


@pytest.fixture(scope="module")
def sealed_of(tmp_path_factory):
    """``sealed_of(family)``: folder of a tiny model that is exact in bfloat16, and of rollouts of a policy near it."""
    known = tmp_path_factory.mktemp("sealed")

    def of(family: str) -> Path:
        if not (known / family).exists():
            in_fork(lambda: seal(family, known / family))
        return known / family

    return of


@pytest.fixture(scope="module")
def outcome(sealed_of, tmp_path_factory):
    """``outcome(case, backend)``, computed once and kept on disk, because each test is a process of its own."""
    known = tmp_path_factory.mktemp("outcomes")

    def of(case: Case, backend: str) -> Outcome:
        file = known / hashlib.sha256(repr((case, backend)).encode()).hexdigest()
        if not file.exists():
            file.write_bytes(pickle.dumps(outcome_of(case, backend, sealed_of(case.family), counted)))
        return pickle.loads(file.read_bytes())

    return of


def on_cpu(case: Case) -> Case:
    """The case that computes the same numbers on the CPU, on one rank and in one piece."""
    actor = case.actor | {"recompute": "none"} | TORCH
    # with the same number of updates, so that cases share the result
    return Case(objective=case.objective, fields=case.fields, actor=actor, family=case.family)


@pytest.mark.parametrize("name", CASES)
def test_updates_agree_with_the_cpu(outcome, name):
    case = CASES[name]
    cpu, device = outcome(on_cpu(case), "cpu"), outcome(case, "cuda")
    distance = Distance.between(device, cpu)
    assert len(distance.losses) == case.updates
    # M2PO masks the tokens above a threshold: rounding may move one of some two hundred across it
    factor = {"m2po": 6}.get(case.objective, ROUNDING.get(case.family, 1))
    assert distance.tolerable(factor), distance


def check_waits(outcome: Outcome, allowed: int) -> None:
    for seen in outcome.seen:
        own = {place: n for place, n in seen.own_waits.items() if "megarl/actor/dispatch.py" not in place}
        assert sum(own.values()) <= allowed, "\n".join(f"{n} x {place}" for place, n in own.items())
        assert seen.own_waits.total() - sum(own.values()) <= LAYERS * outcome.micro_batches


@pytest.mark.parametrize("name", ["one", *SEVERAL, *FAMILIES, "adapters DP2", "adapters TP2 EP2"])
def test_megarl_waits_at_most_twice_per_update_outside_dispatch(outcome, name):
    check_waits(outcome(CASES[name], "cuda"), OWN_WAITS)


def test_waits_and_launches_stay_within_limits(outcome):
    for seen in outcome(CASES["one"], "cuda").seen:
        assert seen.waits.total() <= WAITS, seen.waits.most_common()
        assert seen.launch_count <= LAUNCHES


def test_no_branch_of_a_recipe_is_unvisited(outcome):
    """Branches that depend on sizes: those of the 34 recipes of full size, and those of the updates above."""
    visited = set().union(*(outcome(case, "cuda").branches for case in CASES.values()))
    recipes = of_all_recipes()
    assert len(recipes) == 34
    missing = {path: sorted(taken - visited) for path, taken in recipes.items() if not taken <= visited}
    assert not missing, missing
