"""Charts of the report that show metrics unchanged: title, hint, {metric: (label, dash)} and y axis of each."""

from __future__ import annotations

from typing import Any

PERCENT = ".3~p"  # as many digits as the ticks need: ".0%" labels .1 % and .3 % alike
# With up to 3 ticks asked for, Plotly draws 1, 2 and 5 of each decade if there are about two decades, and powers of ten
# if there are more; with more ticks, it draws all of 1 to 9, which overlap
LOGARITHMIC: dict[str, Any] = {"type": "log", "exponentformat": "power", "nticks": 3}
BY_COLUMN = {  # quantity -> title
    "accuracy": "Training accuracy",
    "reward": "Training reward",
    "response_tokens": "Response length",
    "muted_fraction": "Tokens without gradient",
}
CURVES: tuple[tuple[str, str, dict[str, tuple[str, str]], dict[str, Any]], ...] = (
    (
        "Importance ratio quantiles",
        "Probability of the trained tokens now, over that when they were generated, logarithmic. Staleness opens the "
        "fan, which closes at a stage boundary; if it gets wider from stage to stage, that is drift.",
        {
            "ratio/q99": ("q99", "dot"),
            "ratio/q95": ("q95", "dash"),
            "ratio/q50": ("median", "solid"),
            "ratio/q05": ("q05", "dash"),
            "ratio/q01": ("q01", "dot"),
        },
        LOGARITHMIC,
    ),
    (
        "Solve rate",
        "Share of right responses, for rewards that are not just 1 or 0 for right or wrong. In a staged run one policy "
        "generated all data of a stage.",
        {"correct/mean": ("", "solid")},
        {"rangemode": "tozero", "tickformat": PERCENT},
    ),
    (
        "Groups without variance, truncated responses",
        "Share of the prompts whose responses all have the same reward, from which nothing is learnt; and share of the "
        "responses that were cut off at the limit of tokens or of time.",
        {"zero_variance_fraction": ("groups without variance", "solid"), "truncated_fraction": ("truncated", "dot")},
        {"rangemode": "tozero", "tickformat": PERCENT},
    ),
    (
        "KL from the generating policy",
        "Nats per token, estimated on the trained responses: k1, the mean log-ratio, and k3, which is never negative. "
        "It grows with staleness; a jump means that the policy has left the data.",
        {"kl/k1": ("k1", "dot"), "kl/k3": ("k3", "solid")},
        {},
    ),
    (
        "Second moment of the log-ratio (M2)",
        "Mean squared log-ratio of the tokens on which a clip can act; the wider the gap, the more the objective takes "
        "out. Growth by orders of magnitude precedes a collapse.",
        {"m2/before": ("before", "solid"), "m2/after": ("after clip and veto", "dot")},
        LOGARITHMIC | {"autorangeoptions": {"minallowed": -6}},
    ),
    (
        "Effective sample size",
        "mean(ratio)^2 / mean(ratio^2), as a share of the tokens: 1 on fresh data, near 0 if a few tokens dominate.",
        {"ess": ("", "solid")},
        {"rangemode": "tozero"},
    ),
    (
        "Entropy",
        "Nats per token. A slow fall is learning; a sudden fall means that the policy has stopped exploring, a rise "
        "that it deteriorates.",
        {"entropy": ("", "solid")},
        {"rangemode": "tozero"},
    ),
    (
        "Importance ratio by sign of the advantage",
        "Mean ratio of the tokens of good (A > 0) and of bad responses. A fall of the bad ones towards 0 precedes a "
        "collapse.",
        {"ratio/mean/positive": ("good", "solid"), "ratio/mean/negative": ("bad", "dot")},
        {"rangemode": "tozero"},
    ),
    (
        "Share of good responses",
        "Share of tokens with A > 0 in all tokens, and in the magnitudes of the losses. Far below a half, updates "
        "mostly suppress responses.",
        {"positive_share/loss": ("of the loss", "solid"), "positive_share/tokens": ("of the tokens", "dot")},
        {"rangemode": "tozero", "tickformat": PERCENT},
    ),
    (
        "Clip bounds",
        "Importance ratios between which BAPO does not clip, as it balances good and bad responses.",
        {"bapo/ratio_max": ("upper", "solid"), "bapo/ratio_min": ("lower", "dot")},
        {"rangemode": "tozero"},
    ),
    (
        "Dampened tokens",
        "Share of tokens whose effective ratio (times the minimum ratio of the prefix) is below the objective's "
        "threshold, after prefixes that stayed likely and after those that did not. The wider the gap, the more "
        "selective the objective.",
        {"dampen/prefix/bad_prefix": ("bad prefix", "solid"), "dampen/prefix/good_prefix": ("good prefix", "dot")},
        {"rangemode": "tozero", "tickformat": PERCENT},
    ),
    (
        "Prefix occupancy",
        "Probability of the tokens' prefixes now, over that when they were generated: median and lowest 1 %, "
        "logarithmic, not below 2e-9. Low values are tokens that the policy is trained on but would not generate.",
        {"prefix_occupancy/q50": ("median", "solid"), "prefix_occupancy/q01": ("lowest 1 %", "dot")},
        LOGARITHMIC,
    ),
    (
        "Reverse chi-square of the prefixes",
        "Mean of 1 / prefix occupancy - 1, logarithmic: how far the policy has left the prefixes it is trained on.",
        {"prefix/reverse_chi2": ("", "solid")},
        LOGARITHMIC,
    ),
    (
        "Load of experts",
        "Choices of the most used expert of a layer, as a multiple of those it had if all were used alike, mean over "
        "the layers; and share of the experts that no trained token chose. A rise means that routers collapse.",
        {"experts/largest_load": ("largest load", "solid"), "experts/unused_fraction": ("unused", "dot")},
        {"rangemode": "tozero"},
    ),
    (
        "Entropy of the routers",
        "Nats, mean over layers and trained tokens.",
        {"router/entropy": ("", "solid")},
        {"rangemode": "tozero"},
    ),
    (
        "Experts that differ from the recorded ones",
        "Share of the tokens, in a layer, for which the actor's router would choose at least one other expert than "
        "those it replays; and share of the choices.",
        {"routing/tokens_differ": ("tokens", "solid"), "routing/disagreement": ("choices", "dot")},
        {"rangemode": "tozero", "tickformat": PERCENT},
    ),
    (
        "Gradient norm",
        "Before clipping, logarithmic. Look for spikes, and for growth towards the end of a stage.",
        {"grad_norm": ("", "solid")},
        LOGARITHMIC,
    ),
    (
        "Response length",
        "Mean tokens of a response. A drift to the token limit or to nothing usually means that the policy games the "
        "reward.",
        {
            "response_tokens/mean": ("all", "solid"),
            "response_tokens/positive": ("good", "dash"),
            "response_tokens/negative": ("bad", "dot"),
        },
        {"rangemode": "tozero"},
    ),
    (
        "Staleness",
        "Number of updates between the weights that generated the data and those that are trained. In a staged run "
        "each tooth is one stage.",
        {"staleness": ("", "solid")},
        {"rangemode": "tozero"},
    ),
)
