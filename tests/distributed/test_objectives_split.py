"""The same data gives the same gradient for every split over data-parallel ranks, context-parallel ranks and
micro-batches. Every objective is applied to a linear policy by gloo ranks, and by one process on a single batch."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from megarl.batch import ContextShard, TokenBatch
from megarl.objectives import OBJECTIVES, build_objective, denominator, token_weights

pytestmark = pytest.mark.layouts

FEATURES, VOCABULARY, LONGEST = 6, 9, 40
WORLD = 4
LAYOUTS = [(2, 2), (1, 4)]  # (data parallel, context parallel)
BACKENDS = ("torch", "cpp")  # each has its own random assignment of sequences to ranks and micro-batches

CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in OBJECTIVES} | {
    "m2po-released": ("m2po", {"variant": "released"}),
    "bapo-released": ("bapo", {"variant": "released"}),
    "prefix_ratio_grpo-full": ("prefix_ratio_grpo", {"prefix_gradient": "full", "eps_low": 0.5, "eps_high": 0.5}),
    "prefix_filter": ("prefix_filter", {"filter_fraction": 0.2}),  # of 127 tokens
    "bapo-endless": ("bapo", {"high_end": math.inf, "positive_target": 0.55}),
    "cppo-strict": ("cppo", {"threshold": 0.05, "prefix_threshold": 0.01, "smallest_weight": 0.3}),
    "oapl": ("oapl", {"beta": 0.7}),
    "trm-masks": ("trm", {"threshold": 0.3}),
    "gspo-token_mean": ("gspo", {"aggregation": "token_mean", "eps_low": 0.05, "eps_high": 0.05}),
    "minpro-sequence_mean": ("minpro", {"aggregation": "sequence_mean"}),
    **{
        f"mu_grpo-{scope}": ("mu_grpo", {"veto_scope": scope, "veto_threshold": 0.6, "ratio_max": 1.5})
        for scope in ("sequence", "suffix", "non_trigger_suffix", "trigger")
    },
    "grpo-options": (
        "grpo",
        {"dual_clip": {"clip_ratio_c": 1.5}, "icepop": {"minimum": 0.8, "maximum": 1.3}, "opsm": {"delta": 0.01},
         "kl": {"coefficient": 0.1, "kind": "k2"}},
    ),
}  # fmt: skip


# objectives that mute no token
KEEPS_ALL = ("cispo", "drpo", "full_prefix", "gppo", "minpro", "oapl", "sapo", "topr", "reinforce", "vespo")


def backends(case: str) -> tuple[str, ...]:
    """The backends of a case; some objectives have no rule in the fused C++ pass."""
    objective = build_objective(*CASES[case])
    return BACKENDS if getattr(objective, "objective", objective).fused else BACKENDS[:1]


def policy_logprobs(data: dict[str, torch.Tensor], weight: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """[len(where)] float32 log-probs of the sampled tokens by a linear policy, logits = features @ weight
    [FEATURES, VOCABULARY], in float64, so that sums in another order agree to 1e-15.

    In data with ties they are rounded to multiples of 1/64; the gradient is that of the exact ones.
    """
    scores = torch.log_softmax(data["features"][where] @ weight, -1)
    exact = scores.gather(1, data["tokens"][where, None])[:, 0]
    rounded = (exact * 64).round() / 64 if bool(data["ties"]) else exact
    return (exact + (rounded - exact).detach()).float()


def make_data(ties: bool) -> dict[str, torch.Tensor]:
    """12 padded sequences, in which a fifth of the tokens has no loss; in two of them no token has one."""
    g = torch.Generator().manual_seed(7)
    sequences = 12
    lengths = torch.randint(1, LONGEST, (sequences,), generator=g)
    padded = (lengths + 7) // 8 * 8  # two chunks on each of up to four context-parallel ranks
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), padded.cumsum(0)])
    total = int(cu[-1])
    data = {
        "features": torch.randn(total, FEATURES, dtype=torch.float64, generator=g),
        "tokens": torch.randint(VOCABULARY, (total,), generator=g),
        "weight": torch.randn(FEATURES, VOCABULARY, dtype=torch.float64, generator=g) * 0.5,
        "cu": cu,
        "ties": torch.tensor(ties),
    }
    ids = torch.repeat_interleave(torch.arange(sequences), padded)
    position = torch.arange(total) - cu[ids]
    data["mask"] = (position < lengths[ids]) & (torch.rand(total, generator=g) < 0.8) & (ids != 3) & (ids != 8)
    sign = torch.tensor([1.0, -1.0]).repeat(sequences // 2)
    data["advantages"] = (sign * (0.2 + torch.rand(sequences, generator=g)))[ids]
    now = policy_logprobs(data, data["weight"], torch.arange(total))
    shift = torch.randn(total, generator=g) * 0.5
    shift = (shift * 8).round() / 8 if ties else shift
    negative = data["mask"] & (data["advantages"] < 0)
    shift[negative.nonzero()[20::40]] = -12.0  # a few triggers of the veto at its default threshold
    data["rollout"], data["old"] = now - shift, now - 0.5 * shift
    data["ref"] = now + 0.2 * torch.randn(total, generator=g)
    if ties:
        data["advantages"] = data["advantages"].sign()
    return data


DATA = {ties: make_data(ties) for ties in (False, True)}


def make_batch(
    data: dict[str, torch.Tensor], weight: torch.Tensor, sequences: list[int], shard: ContextShard | None
) -> Any:
    """(TokenBatch, indices of its tokens in `data`) of some sequences, or of a rank's zigzag chunks of them."""
    places, lengths = [torch.zeros(0, dtype=torch.int64)], []
    for s in sequences:
        tokens = torch.arange(int(data["cu"][s]), int(data["cu"][s + 1]))
        if shard is not None:
            chunks = tokens.chunk(2 * shard.size)
            tokens = torch.cat([chunks[shard.rank], chunks[2 * shard.size - 1 - shard.rank]])
        places.append(tokens)
        lengths.append(len(tokens))
    where = torch.cat(places)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    batch = TokenBatch(
        policy_logprobs(data, weight, where), data["rollout"][where], data["advantages"][where], data["mask"][where],
        cu_seqlens,
        old_logprobs=data["old"][where], ref_logprobs=data["ref"][where],
        sequence_index=torch.tensor(sequences, dtype=torch.int64), shard=shard,
    )  # fmt: skip
    return batch, where


def update(
    ties: bool, case: str, micro_batches: list[list[int]], shard: ContextShard | None, world: Any, backend: str
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Loss, gradient, kept tokens and metrics of one update, summed over the ranks of `world` (None: one process), and
    the objective's statistics."""
    objective, data = build_objective(*CASES[case]), DATA[ties]
    weight = data["weight"].clone().requires_grad_()
    batches = [make_batch(data, weight, sequences, shard) for sequences in micro_batches]
    whole = TokenBatch.concatenate([batch.detach() for batch, _ in batches])
    statistics = objective.statistics(whole, world, backend)

    def total(x: torch.Tensor) -> torch.Tensor:
        if world is not None:
            dist.all_reduce(x, group=world)
        return x

    count = total(sum(denominator(b.loss_mask, b.cu_seqlens, objective.aggregation, b.shard) for b, _ in batches))
    results = {"loss": torch.zeros((), dtype=torch.float64), "kept": torch.zeros(data["mask"].shape).double()}
    for batch, where in batches:
        terms = objective(batch, statistics, backend)
        weights = token_weights(batch.loss_mask, batch.cu_seqlens, objective.aggregation, batch.shard)
        results["loss"] = results["loss"] + (terms.loss.double() * weights).sum() / count
        results["kept"][where] += terms.kept.double()
        pairs = {f"metric {name}": torch.stack(pair) for name, pair in terms.metrics.items()} | terms.histograms
        results |= {name: results.get(name, 0) + pair.double() for name, pair in pairs.items()}
    (results["gradient"],) = torch.autograd.grad(results["loss"], weight)
    results["loss"] = results["loss"].detach()
    vector_to_parameters(total(parameters_to_vector(results.values())), results.values())
    if isinstance(statistics, torch.Tensor):
        return results, [statistics]
    return results, list(statistics or ())


def deal(layout: tuple[int, int], rank: int, partition: int, sequences: int) -> list[list[int]]:
    """This rank's three micro-batches: random sequences in random order, different ones on each data-parallel rank."""
    g = torch.Generator().manual_seed(1000 * partition + 10 * layout[0] + layout[1])
    order = torch.randperm(sequences, generator=g).tolist()
    owner = torch.randint(layout[0], (sequences,), generator=g).tolist()
    mine = [s for s in order if owner[s] == rank // layout[1]]
    cuts = sorted(torch.randint(len(mine) + 1, (2,), generator=g).tolist())
    return [mine[: cuts[0]], mine[cuts[0] : cuts[1]], mine[cuts[1] :]]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    results = {}
    for layout in LAYOUTS:
        size = layout[1]
        groups = [dist.new_group(range(first, first + size)) for first in range(0, WORLD, size)]
        shard = ContextShard(groups[rank // size], rank % size, size)
        for ties, data in DATA.items():
            for case in CASES:
                for partition, backend in enumerate(backends(case)):
                    micro_batches = deal(layout, rank, partition, len(data["cu"]) - 1)
                    split = update(ties, case, micro_batches, shard, dist.group.WORLD, backend)
                    results.setdefault((case, ties, backend), []).append(split)
    if rank == 0:  # the results are summed over ranks
        torch.save(results, f"{folder}/results.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """The results of all layouts: of the first rank, a fork of this process, which has imported everything."""
    folder = tmp_path_factory.mktemp("split")
    mp.start_processes(worker, args=(str(folder),), nprocs=WORLD, start_method="fork")
    return torch.load(folder / "results.pt")


def whole(ties: bool, case: str, backend: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The results of one process on a single batch."""
    return update(ties, case, [list(range(12))], None, None, backend)


@pytest.mark.parametrize("ties", [False, True], ids=["continuous", "ties"])
@pytest.mark.parametrize(("case", "backend"), [(case, backend) for case in CASES for backend in backends(case)])
def test_the_same_data_gives_the_same_gradient_for_every_split(
    splits: dict[Any, Any], case: str, ties: bool, backend: str
) -> None:
    one, of_one = whole(ties, case, backend)
    assert float(one["gradient"].norm()) > 1e-3, "a test without a gradient shows nothing"
    share = int(one["kept"].sum()) / int(DATA[ties]["mask"].sum())
    assert share == 1 if case.split("-")[0] in KEEPS_ALL else 0.1 < share < 1, "a mask that masks nothing shows nothing"
    for layout, (split, statistics) in zip(LAYOUTS, splits[case, ties, backend], strict=True):
        assert all(torch.equal(*pair) for pair in zip(statistics, of_one, strict=True)), layout
        error = float((split["gradient"] - one["gradient"]).norm() / one["gradient"].norm())
        assert error < 1e-6, f"{layout}: {error}"
        assert split.keys() == one.keys()
        for name, found in split.items():
            if name == "loss" or name.startswith("metric "):
                assert found.tolist() == pytest.approx(one[name].tolist(), rel=1e-6, abs=1e-9), f"{layout} {name}"
            elif name != "gradient":  # kept tokens and histograms
                assert torch.equal(found, one[name]), f"{layout} {name}"


def test_ties_reach_the_threshold_of_the_second_moment_mask() -> None:
    """In the data with ties, M2PO masks some of several tokens with equal log-ratios, so their order matters."""
    data, (one, (threshold, *_)) = DATA[True], whole(True, "m2po", "torch")
    l = policy_logprobs(data, data["weight"], torch.arange(len(data["mask"]))) - data["rollout"]
    trust = data["mask"] & (data["advantages"] * l > 0) & (l.abs() == threshold)
    kept = one["kept"].bool()
    assert (trust & kept).any() and (trust & ~kept).any()


def test_without_sequence_index_ties_are_masked_together() -> None:
    """Ranks then share no order of the tokens, so for every split to agree the threshold alone must decide."""
    data = DATA[True]
    batch, _ = make_batch(data, data["weight"], list(range(12)), None)
    objective = build_objective("m2po", {})
    bare = replace(batch.detach(), sequence_index=None)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        grouped = objective.statistics(bare, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    alone = objective.statistics(bare)
    assert torch.equal(alone[0], grouped[0])
    l = bare.logprobs - bare.rollout_logprobs
    trust = bare.loss_mask & (bare.advantages * l > 0)
    kept = objective(bare, grouped).kept & trust
    assert torch.equal(kept, trust & (l.abs() < alone[0]))
    assert int(kept.sum()) < int((objective(bare, alone).kept & trust).sum())
