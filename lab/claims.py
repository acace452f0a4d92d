"""The papers' claims as differences that the lab's runs can decide, and a verdict on each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lab.results import Sweep, Value, at, difference, estimate, last, mean
from megarl.commands.sweep.results import Estimate

EARLY, END = 64, 256  # updates
SEEDS = 5  # fewer decide nothing
# every point that has a run that collapses; without `mu_grpo_none`, whose runs are those of `reinforce` but for one
UNSTABLE = (
    *("reinforce", "vcpo", "decoupled_ppo", "gppo", "sapo", "cispo", "prefix_filter", "m2po_high"),
    *("mu_grpo", "mu_grpo_suffix", "mu_grpo_rest", "mu_grpo_trigger"),
)
FIRST, SECOND = (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)  # sets of seeds: every verdict is asked of both
MARGIN = 0.05  # accuracies that differ by less are called equal
ALARM = 0.8  # effective sample size, as a share of the tokens; chosen on `lab/pilot.toml`

Side = Literal["above", "below", "equal"]
State = Literal["holds", "opposite", "open", "too few", "not run"]


@dataclass(frozen=True)
class Part:
    """A number of a seed whose mean the claim says to be above or below 0, or within `MARGIN` of it."""

    text: str
    value: Value
    side: Side = "above"
    sweep: str = "frozen"
    seen: tuple[int, ...] = ()  # seeds whose runs were there when the part was written


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what would show it here."""

    name: str
    source: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Finding:
    """A part on one set of seeds."""

    part: Part
    estimate: Estimate | None
    state: State
    counts: bool  # False where a seed was seen before the part was written


def find(part: Part, sweeps: Mapping[str, Sweep], seeds: Sequence[int]) -> Finding:
    """`State` from the 95 % interval over ``seeds``, all of which must have been run and have the number."""
    sweep = sweeps[part.sweep]
    counts = not set(seeds) & set(part.seen)
    values = [x for seed in seeds if (x := part.value(sweep, seed)) is not None]
    if len(values) < SEEDS:
        return Finding(part, None, "not run", counts)
    found = estimate(sweep, seeds, part.value)
    if found is None or sum(map(math.isfinite, values)) < SEEDS:
        return Finding(part, found, "too few", counts)
    low, high = found.ci95
    if part.side == "below":
        low, high = -high, -low
    if part.side == "equal":
        low, high = (MARGIN - max(abs(low), abs(high)), MARGIN - (0 if low <= 0 <= high else min(abs(low), abs(high))))
    return Finding(part, found, "holds" if low > 0 else "opposite" if high < 0 else "open", counts)


def verdict(findings: Sequence[Finding]) -> str:
    """Of all parts of a claim together that count."""
    states = {finding.state for finding in findings if finding.counts}
    if "not run" in states:
        return "not run"
    if "too few" in states:
        return "too few to tell"
    if states == {"holds"}:
        return "reproduced"
    if "holds" in states:
        return "partly"
    return "not reproduced" if "opposite" in states else "cannot be seen at this size"


# ----------------------------------------------------------------------------------------------------------- values


def collapse(sweep: Sweep, point: str, seed: int) -> int | None:
    """The last evaluation before the first one that has less than half of the best so far; None without a collapse."""
    best, last = 0.0, 0
    for update, accuracy in sorted(sweep.curve(point, seed, "accuracy").items()):
        if accuracy < best / 2:
            return last
        best, last = max(best, accuracy), update
    return None


def warning(sweep: Sweep, point: str, seed: int, level: float = ALARM) -> int | None:
    """The first update of the first window whose mean effective sample size is below ``level``."""
    windows = sorted(sweep.curve(point, seed, "ess").items())
    return next((update for update, ess in windows if ess < level), None)


def lead(points: Sequence[str], level: float = ALARM, least: int = 0) -> Value:
    """Updates from the warning to the last evaluation before the collapse, less ``least``: a seed's mean over those of
    its runs in which both happened, NaN where there is none."""

    def value(sweep: Sweep, seed: int) -> float | None:
        run = [point for point in points if sweep.curve(point, seed, "accuracy")]
        ends = [(collapse(sweep, point, seed), warning(sweep, point, seed, level)) for point in run]
        found = [end - begin - least for end, begin in ends if end is not None and begin is not None]
        if not run:
            return None
        return sum(found) / len(found) if found else math.nan

    return value


def smallest(point: str, metric: str, above: float) -> Value:
    """The smallest window mean, less ``above``."""

    def value(sweep: Sweep, seed: int) -> float | None:
        values = sweep.curve(point, seed, metric).values()
        return min(values) - above if values else None

    return value


def selectivity(point: str, ratio: str) -> Value:
    """How much more often ``ratio`` ("token" or "prefix") is dampened after bad prefixes than after good ones."""

    def value(sweep: Sweep, seed: int) -> float | None:
        bad, good = (sweep.mean(point, seed, f"dampen/{ratio}/{prefix}_prefix") for prefix in ("bad", "good"))
        if bad is None or good is None:
            return None
        return bad / good if good else math.nan

    return value


def less(first: str, second: str, update: int = END) -> Value:
    """Accuracy of ``first`` less that of ``second``."""
    return difference(at(first, update), at(second, update))


def gained(first: str, second: str) -> Value:
    """The last accuracy of ``first`` less that of ``second``, whose numbers of updates differ."""
    return difference(last(first), last(second))


# ----------------------------------------------------------------------------------------------------------- claims


def prosperity(early: int = EARLY, end: int = END) -> Claim:
    """At these updates, as below."""
    return Claim(
        "prosperity before collapse",
        "Prosperity before Collapse, section 4, Figure 3",
        (
            Part(f"no trust region is ahead of eps .2 at {early}", less("reinforce", "grpo", early)),
            Part(
                f"at {end} it has less than half of what it had at {early}",
                difference(at("reinforce", end), at("reinforce", early), 0.5),
                "below",
            ),
        ),
    )


TIGHT_CLIP = Claim(
    "a tight clip learns slower under staleness",
    "How Off-Policy Can GRPO Be?, section 3.1, Figure 2; Prosperity before Collapse, section 4",
    (
        Part(f"eps .1 is behind eps .2 at {EARLY}", less("grpo_tight", "grpo", EARLY), "below"),
        Part(f"eps .2 is behind [0, 5] at {EARLY}", less("grpo", "mu_grpo_none", EARLY), "below"),
        Part(f"eps .2 is behind mu-GRPO at {END}", less("grpo", "mu_grpo"), "below"),
    ),
)


def few_masked(end: int = END) -> Claim:
    return Claim(
        "M2PO masks far fewer tokens than eps-clip, and keeps up",
        "Prosperity before Collapse, Figure 1 (1.22 % of the tokens against .06 %)",
        (
            Part(
                "masked less than a fifth of what eps .2 clips",
                difference(mean("m2po", "m2_mask_fraction"), mean("grpo", "clip_fraction"), 0.2),
                "below",
            ),
            Part(f"is ahead of eps .2 at {end}", less("m2po", "grpo", end)),
        ),
    )


VETO_SCOPES = Claim(
    "what the veto has to remove is the suffix, not its trigger",
    "How Off-Policy Can GRPO Be?, section 3.3, Figure 3",
    (
        Part(
            f"without triggers, the rest of the suffix: ahead of no veto at {END}", less("mu_grpo_rest", "mu_grpo_none")
        ),
        Part("whole response: ahead of no veto", less("mu_grpo", "mu_grpo_none")),
        Part("triggers alone: as no veto", less("mu_grpo_trigger", "mu_grpo_none"), "equal"),
    ),
)


def on(sweep: str, claim: Claim) -> Claim:
    """The same claim about another sweep, whose runs had not been seen when the parts were written for the first."""
    return replace(claim, parts=tuple(replace(part, sweep=sweep, seen=()) for part in claim.parts))


def prefix_ratio(point: str, grpo: str, eps: str, end: int = END) -> Claim:
    """With one clip."""
    return Claim(
        f"the prefix ratio dampens selectively (eps {eps})",
        "Prefix-Ratio GRPO, Table 2 (99.4 % after bad prefixes, 22.6 % after good ones; 5.1 and 2.2 without)",
        (
            Part(
                "rate after bad prefixes / after good ones, above GRPO's",
                difference(selectivity(point, "prefix"), selectivity(grpo, "token")),
            ),
            Part(f"ahead of GRPO at {end}", less(point, grpo, end)),
        ),
    )


def positive_share(end: int = END) -> Claim:
    return Claim(
        "BAPO raises the share of positive tokens and keeps entropy",
        "BAPO, Figure 8",
        (
            Part(
                "share of the loss over all updates, above GRPO's",
                difference(mean("bapo", "positive_share/loss"), mean("grpo", "positive_share/loss")),
            ),
            Part(f"entropy at {end} above GRPO's", difference(at("bapo", end, "entropy"), at("grpo", end, "entropy"))),
        ),
    )


PAPERS = {
    "m2po": "Prosperity before Collapse, section 5",
    "minpro": "A Step Back, section 5",
    "mu_grpo": "How Off-Policy Can GRPO Be?, section 4",
    "pr_grpo": "Prefix-Ratio GRPO",
    "bapo": "BAPO",
    "dppo": "DPPO with total variation, 2602.04879",
    "dppo_kl": "DPPO with the KL divergence, 2602.04879",
    "sapo": "SAPO, 2511.20347",
    "vespo": "VESPO, 2602.10693",
    "trm": "TRM, 2512.23075",
    "gppo": "GPPO, 2508.07629",
    "dcpo": "DCPO, 2509.02333",
}
LATER = ("dppo", "dppo_kl", "sapo", "vespo", "trm", "gppo", "dcpo")
AT_SIZE = ("m2po", "minpro", "mu_grpo", "pr_grpo", "bapo", "dppo", "trm")  # in `PRETRAINED`


def outlives(point: str, seen: tuple[int, ...] = (), early: int = EARLY, end: int = END) -> Claim:
    """Of an objective that is to be stable; ``seen`` is of the second part."""
    return Claim(
        f"`{point}` is stable where no trust region is not",
        PAPERS[point],
        (
            Part(f"ahead of no trust region at {end}", less(point, "reinforce", end)),
            Part(f"no less at {end} than at {early}", difference(at(point, end), at(point, early)), seen=seen),
        ),
    )


ONE_RATE = (
    prosperity(),
    TIGHT_CLIP,
    few_masked(),
    VETO_SCOPES,
    Claim(
        "M2PO is insensitive to its threshold",
        "Prosperity before Collapse, Figure 8",
        (
            Part(f".01 as .04 at {END}", less("m2po_low", "m2po"), "equal"),
            Part(f".16 as .04 at {END}", less("m2po_high", "m2po"), "equal"),
        ),
    ),
    Claim(
        "MinPRO is ahead of CISPO",
        "A Step Back, section 5",
        (Part(f"at {END}", less("minpro", "cispo")),),
    ),
    Claim(
        "MinPRO is ahead of the full prefix ratio",
        "A Step Back, section 6.2",
        (Part(f"at {END}", less("minpro", "full_prefix")),),
    ),
    prefix_ratio("pr_grpo", "grpo", ".2"),
    prefix_ratio("pr_grpo_tight", "grpo_tight", ".1"),
    positive_share(),
    Claim(
        "the effective sample size warns of a collapse",
        "VCPO (arXiv:2602.17616)",
        (
            Part(f"no trust region: below {ALARM} at least 32 updates before", lead(["reinforce"], least=32)),
            Part(f"smallest of eps .2, which does not collapse, above {ALARM}", smallest("grpo", "ess", ALARM)),
            Part(
                f"below {ALARM} at least 32 updates before, in any run that collapses",
                lead(UNSTABLE, least=32),
                seen=FIRST + SECOND,
            ),
            Part("the same, CISPO alone", lead(["cispo"], least=32), seen=FIRST + SECOND),
            Part(
                f"smallest of M2PO, which does not collapse, above {ALARM}", smallest("m2po", "ess", ALARM), seen=FIRST
            ),
        ),
    ),
    Claim(
        "a learning rate that falls with the effective sample size stabilises",
        "VCPO (arXiv:2602.17616)",
        (Part(f"ahead of the same objective without at {END}", less("vcpo", "reinforce")),),
    ),
    *(outlives(name, FIRST if name == "dppo" else ()) for name in LATER),
)

OTHERS = (
    on("learn", prosperity()),
    on("long", prosperity()),
    on("learn", TIGHT_CLIP),
    on("long", few_masked()),
    Claim(
        "M2PO at a staleness of 256 is as good as GRPO on fresh rollouts",
        "Prosperity before Collapse, Table 1",
        (Part(f"S = 256 as GRPO at S = 4, at {END}", less("m2po,256", "grpo,4"), "equal", "staleness"),),
    ),
    on("learn", VETO_SCOPES),
    Claim(
        "a single stage is worse than four",
        "How Off-Policy Can GRPO Be?, Table 4",
        (Part(f"mu-GRPO at {END}: S = 256 is behind S = 64", less("mu_grpo,256", "mu_grpo,64"), "below", "staleness"),),
    ),
    Claim(
        "four stages are as good as eight",
        "How Off-Policy Can GRPO Be?, Table 4",
        (Part(f"mu-GRPO at {END}: S = 64 as S = 32", less("mu_grpo,64", "mu_grpo,32"), "equal", "staleness"),),
    ),
    Claim(
        "more updates on fixed data are worth their staleness",
        "How Off-Policy Can GRPO Be?, Table 3",
        (
            Part(
                "mu-GRPO: 256 updates of 8 prompts, ahead of 64 of 32",
                gained("8,mu_grpo", "32,mu_grpo"),
                "above",
                "batches",
            ),
            Part("ahead of 32 of 64", gained("8,mu_grpo", "64,mu_grpo"), "above", "batches"),
        ),
    ),
)


def ahead(point: str, end: int) -> Claim:
    parts = (Part(f"at {end}", less(point, "grpo", end)),)
    return Claim(f"`{point}` is ahead of GRPO on one frozen stage", PAPERS[point], parts)


# one stage of 128 updates
PRETRAINED = (
    prosperity(32, 128),
    few_masked(128),
    prefix_ratio("pr_grpo", "grpo", ".2", 128),
    positive_share(128),
    *(ahead(point, 128) for point in AT_SIZE if point not in ("m2po", "pr_grpo")),
    *(outlives(point, early=32, end=128) for point in AT_SIZE),
)

# by the headings of the tables
CLAIMS = {
    "one stage of the short task, lr 5e-4": ONE_RATE,
    "the same at lr 2e-4": tuple(on("frozen_low", claim) for claim in ONE_RATE),
    "other tasks, stages and batches": OTHERS,
    "a pretrained model of 135M parameters": tuple(on("pretrained", claim) for claim in PRETRAINED),
}
