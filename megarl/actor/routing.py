"""Routing replay: each token goes to experts given with the micro-batch, not to those that the routers would choose.

It replaces Megatron's RouterReplay, which keeps one tensor per router: with several micro-batches in flight and full
recomputation it silently replays the wrong one. Here the routers of a model chunk get the experts of a micro-batch
before the chunk's forward pass, and again when the backward pass of that micro-batch reaches the chunk.

`second_choices` is for finding the tokens whose experts depend on rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

Experts = dict[int, torch.Tensor]  # layer number, from 1 -> [tokens of this rank, top_k] int; -1: router chooses


class LayerRouting:
    """What one router uses instead of Megatron's RouterReplay.

    target: the given experts of the current micro-batch, None: none given. replays: whether the router uses them, or
    only counts in ``agreement`` how many differ from its own choice. nearness: as in `second_choices`; 0 outside it.
    """

    def __init__(self, layer: int, replays: bool) -> None:
        self.layer, self.replays = layer, replays
        self.target: torch.Tensor | None = None
        self.nearness = 0.0
        self.own: torch.Tensor | None = None  # the experts that the router itself chose in the last forward pass
        self.counts = False  # whether to count disagreements; False while a forward pass is recomputed
        self.agreement: torch.Tensor | None = None  # [2] float64: number of given experts that differ, of all given

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's contract: scores [t, experts] -> scores and indices of the chosen experts, both [t, topk]."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.nearness:
            down = -self.nearness * scores.abs().amax(1, keepdim=True)
            without = scores.scatter_add(1, own, down.expand(-1, topk))
            _, own = default_compute_topk(without, topk, num_groups=num_groups, group_topk=group_topk)
            values = scores.gather(1, own)
        self.own = own
        if self.target is None:
            return values, own
        target = self.target.to(own.dtype)
        known = target >= 0
        if self.counts:
            differs = known & ~(target[:, :, None] == own[:, None, :]).any(-1)
            counted = torch.stack([differs.sum(), known.sum()]).double()
            self.agreement = counted if self.agreement is None else self.agreement + counted
        if not self.replays:
            return values, own
        chosen = torch.where(known, target, own)
        return scores.gather(1, chosen), chosen


def install(models: Sequence[torch.nn.Module], replays: bool) -> None:
    """Prepare the routers of these model chunks for `begin` and `end`. replays: as in `LayerRouting`.

    A model without experts is left as it is; a chunk of a model with experts may have only dense layers.
    """
    for model in models:
        config: Any = model.config
        if config.num_moe_experts is None:
            continue
        routers = [m for m in model.modules() if isinstance(m, TopKRouter)]
        layers = [LayerRouting(router.layer_number, replays) for router in routers]
        for router, layer in zip(routers, layers, strict=True):
            router.router_replay = layer
        model.layer_routings = layers  # type: ignore[assignment]


def routings(model: torch.nn.Module) -> list[LayerRouting]:
    """The `LayerRouting`s of a chunk, wrapped in DDP or not; [] without `install` and in a chunk of dense layers."""
    return _installed(model) or []


@contextmanager
def second_choices(models: Sequence[torch.nn.Module], nearness: float) -> Iterator[None]:
    """Context in which routers resolve close calls the other way: of two experts whose scores differ by less than
    ``nearness`` times the token's largest absolute score, the one that was not chosen replaces the one that was.

    `install` must have prepared the models.
    """
    assert all(_installed(model) is not None for model in models)
    layers = [layer for model in models for layer in routings(model)]
    for layer in layers:
        layer.nearness = nearness
    try:
        yield
    finally:
        for layer in layers:
            layer.nearness = 0.0


def _installed(model: torch.nn.Module) -> list[LayerRouting] | None:
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    return getattr(inner, "layer_routings", None)


def begin(model: torch.nn.Module, experts: Experts | None) -> None:
    """Give the routers the experts of a micro-batch, None for none. Call it before the forward pass."""
    _set_targets(routings(model), experts, counts=True)


def end(model: torch.nn.Module, experts: Experts | None, output: Any) -> Experts:
    """Call it after the forward pass; returns the experts that the routers chose themselves.

    Registers hooks on ``output`` that give the experts to the routers again when the backward pass of the micro-batch
    begins, for the forward pass that it recomputes.
    """
    layers = routings(model)
    if experts is not None and layers:

        def again(gradient: torch.Tensor) -> torch.Tensor:
            _set_targets(layers, experts, counts=False)
            return gradient

        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(again)
    return {layer.layer: layer.own for layer in layers if layer.own is not None}


def _set_targets(layers: list[LayerRouting], experts: Experts | None, counts: bool) -> None:
    for layer in layers:
        layer.target = None if experts is None else experts[layer.layer]
        layer.counts = counts


def count_disagreement(models: Sequence[torch.nn.Module], device: torch.device) -> torch.Tensor | None:
    """[2] float64: number of given experts that the routers would not have chosen, and of all given experts, since the
    last call, over all layers, tokens and ranks. Collective over all ranks. None without `install`.
    """
    if all(_installed(model) is None for model in models):
        return None
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for layer in (layer for model in models for layer in routings(model)):
        if layer.agreement is not None:
            total += layer.agreement
            layer.agreement = None
    dist.all_reduce(total)
    return total


def disagreement(differ: float, count: float) -> dict[str, float]:
    """``routing/disagreement``: share of the given experts that the routers themselves would not have chosen."""
    return {"routing/disagreement": differ / count} if count else {}
