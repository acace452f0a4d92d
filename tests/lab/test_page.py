"""docs/lab.md shows what the committed results say: every interval on the page follows from them."""

import re

from lab.results import Sweep, Value, at, difference, estimate, last
from lab.tables import text
from megarl.commands.sweep.results import Estimate
from tests.helpers import ROOT

NUMBER = r"([-+]?\d*\.?\d+)"
INTERVAL = re.compile(rf"{NUMBER}(?:\s%)?\s\[{NUMBER},\s{NUMBER}\]")
PAGE = ROOT / "docs/lab.md"
FIRST, BOTH = range(5), range(10)


def across(sweeps: dict[str, Sweep], objective: str, other: str) -> Estimate | None:
    """What a point of `schedules` ends with, less the same one of another sweep, whose base model may be another."""
    runs = {("constant", seed): sweeps["schedules"].curve(f"constant,{objective}", seed, "accuracy") for seed in FIRST}
    runs |= {("other", seed): sweeps[other].curve(objective, seed, "accuracy") for seed in FIRST}
    return estimate(Sweep(runs), FIRST, difference(last("constant"), last("other")))


def less(first: str, second: str, update: int = 256, before: int | None = None) -> Value:
    return difference(at(first, update), at(second, update if before is None else before))


def beside_the_tables(sweeps: dict[str, Sweep]) -> list[Estimate | None]:
    """The estimates that only the page has."""
    low, sizes, long = sweeps["frozen_low"], sweeps["grid_sizes"], sweeps["long"]
    rose = [seed for seed in BOTH if long.curve("reinforce", seed, "accuracy")[64] > 0.5]
    return [
        *(across(sweeps, objective, "frozen") for objective in ("grpo", "m2po", "reinforce", "mu_grpo")),
        *(across(sweeps, objective, "frozen_low") for objective in ("grpo", "m2po")),
        estimate(low, BOTH, less("mu_grpo", "mu_grpo", before=128)),
        estimate(low, BOTH, less("mu_grpo", "mu_grpo_trigger")),
        estimate(low, BOTH, less("m2po_high", "m2po")),
        estimate(sweeps["frozen_1024"], FIRST, at("m2po", 512)),
        estimate(sizes, FIRST, less("dense_1m,reinforce", "dense_1m,grpo", 64)),
        estimate(sizes, FIRST, less("moe_4m,reinforce", "moe_4m,grpo", 64)),
        estimate(sizes, FIRST, less("moe_4m,reinforce", "moe_4m,reinforce", before=64)),
        estimate(long, rose, at("reinforce", 64)),
        estimate(long, rose, less("reinforce", "grpo", 64)),
    ]


def intervals(page: str) -> list[tuple[str, str, str]]:
    return INTERVAL.findall(page)


def is_one_of(shown: tuple[str, str, str], known: list[tuple[float, float, float]]) -> bool:
    """Whether the three numbers are those of a known estimate, rounded; a difference may stand the other way round."""
    half = 0.5 * 10 ** -max(len(number.partition(".")[2]) for number in shown) + 0.0005 + 1e-9  # the tables round too
    mean, low, high = map(float, shown)
    return any(
        all(abs(a - b) <= half for a, b in zip(values, (mean, low, high), strict=True))
        or all(abs(a + b) <= half for a, b in zip(values, (mean, high, low), strict=True))
        for values in known
    )


def known_estimates(sweeps: dict[str, Sweep]) -> list[tuple[float, float, float]]:
    found = [tuple(map(float, numbers)) for numbers in intervals(text(sweeps))]
    extra = beside_the_tables(sweeps)
    assert None not in extra
    return found + [(one.mean, *one.ci95) for one in extra if one]


def test_every_interval_of_the_page_follows_from_the_results(sweeps):
    known, shown = known_estimates(sweeps), intervals(PAGE.read_text())
    assert len(shown) > 100
    assert [numbers for numbers in shown if not is_one_of(numbers, known)] == []


def test_every_estimate_beside_the_tables_is_on_the_page(sweeps):
    shown = intervals(PAGE.read_text())
    unused = [one for one in beside_the_tables(sweeps) if not any(is_one_of(n, [(one.mean, *one.ci95)]) for n in shown)]
    assert unused == []
