"""Routing replay: each token goes to experts given with the micro-batch, not to those that the routers would choose.

And `favouring`, which shows at which tokens the choice hangs on rounding.

It replaces Megatron's RouterReplay, which keeps one tensor per router: with several micro-batches in flight and full
recomputation it silently replays the wrong one. Here the routers of a model chunk get the experts of a micro-batch
before the chunk's forward pass, and again when the backward pass of that micro-batch reaches the chunk.
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
    """Takes the place of Megatron's RouterReplay in one router.

    target: the given experts of the current micro-batch, None: none given. replays: whether the router uses them, or
    only counts in ``agreement`` how many differ from its own choice. favour: added to the scores before the choice,
    from 0 for the first expert to this for the last.
    """

    def __init__(self, layer: int, replays: bool) -> None:
        self.layer, self.replays = layer, replays
        self.target: torch.Tensor | None = None
        self.favour = 0.0
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
        preferred = scores
        if self.favour:
            preferred = scores + torch.linspace(
                0, self.favour, scores.shape[1], dtype=scores.dtype, device=scores.device
            )
        values, own = default_compute_topk(preferred, topk, num_groups=num_groups, group_topk=group_topk)
        if self.favour:
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
def favouring(models: Sequence[torch.nn.Module], favour: float) -> Iterator[None]:
    """Routers choose the later (``favour`` > 0) or the earlier of experts whose scores differ by less than rounding.

    Scores of the first and the last expert may differ by up to ``favour`` and still be exchanged. Needs `install`.
    """
    layers = [layer for model in models for layer in routings(model)]
    for layer in layers:
        layer.favour = favour
    try:
        yield
    finally:
        for layer in layers:
            layer.favour = 0.0


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
