"""Routing replay: each token goes to experts given with the micro-batch, not to those that the routers would choose.

It replaces Megatron's RouterReplay, which keeps one tensor per router: with several micro-batches in flight and full
recomputation it silently replays the wrong one. Here the routers of a model chunk get the experts of a micro-batch
before the chunk's forward pass, and again when the backward pass of that micro-batch reaches the chunk.

`count` measures how routers use their experts, with one all-reduce an update and no wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

Experts = dict[int, torch.Tensor]  # layer number, from 1 -> [tokens of this rank, top_k] int; -1: router chooses


class LayerRouting:
    """What one router uses instead of Megatron's RouterReplay.

    target: the given experts of the current micro-batch, None: none given.
    """

    def __init__(self, router: TopKRouter) -> None:
        self.router, self.layer = router, int(router.layer_number or 0)
        self.target: torch.Tensor | None = None
        self.own: torch.Tensor | None = None  # the experts that the router itself chose in the last forward pass
        # [t] float64, 1 for the tokens to count, which are those with a loss; None while a forward pass is recomputed,
        # or has no backward pass
        self.counted: torch.Tensor | None = None
        # [4] float64, of counted tokens: number of given experts that differ and of all given; of tokens where one
        # differs and of all
        self.agreement: torch.Tensor | None = None
        # of the last forward pass that counts: scores [t, experts] and chosen experts [t, top_k]
        self.routed: tuple[torch.Tensor, torch.Tensor] | None = None
        # of the first layer of a chunk only: [layers of the chunk, experts + 2] float64, rows as in `count`
        self.used: torch.Tensor | None = None

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
        self.own = chosen = own
        if self.target is not None:
            target = self.target.to(own.dtype)
            known = target >= 0
            if self.counted is not None:
                differs = known & ~(target[:, :, None] == own[:, None, :]).any(-1)
                parts = [differs.sum(1), known.sum(1), differs.any(1), known.any(1)]
                counted = torch.stack(parts).double() @ self.counted
                self.agreement = counted if self.agreement is None else self.agreement + counted
            chosen = torch.where(known, target, own)
            values = scores.gather(1, chosen)
        if self.counted is not None:
            self.routed = scores.detach(), chosen
        return values, chosen

    def distribution(self, scores: torch.Tensor) -> torch.Tensor:
        """[t, experts] float32, the router's probabilities of the experts; sigmoid scores divided by their sum."""
        if self.router.score_function == "sigmoid":
            if self.router.expert_bias is not None:
                scores = scores - self.router.expert_bias  # it is only for the choice
            return (scores / scores.sum(1, keepdim=True)).float()
        return scores.float() if self.router.config.moe_router_pre_softmax else torch.softmax(scores.float(), 1)


def install(models: Sequence[torch.nn.Module]) -> None:
    """Prepare the routers of these model chunks for `begin` and `end`.

    A chunk of a model with experts may have only dense layers.
    """
    for model in models:
        model.layer_routings = [LayerRouting(m) for m in model.modules() if isinstance(m, TopKRouter)]  # type: ignore[assignment]
        for layer in routings(model):
            layer.router.router_replay = layer


def routings(model: torch.nn.Module) -> list[LayerRouting]:
    """The `LayerRouting`s of a chunk, wrapped in DDP or not; [] without `install` and in a chunk of dense layers."""
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    return getattr(inner, "layer_routings", [])


def hold_biases(models: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """A function that gives routers their biases of now, which Megatron moves with each gradient that it computes."""
    routers = [layer.router for model in models for layer in routings(model)]
    held = [(r.expert_bias, r.expert_bias.clone()) for r in routers if r.expert_bias is not None]

    def restore() -> None:
        for bias, before in held:
            bias.copy_(before)

    return restore


def begin(model: torch.nn.Module, experts: Experts | None, trained: Callable[[], torch.Tensor] | None) -> None:
    """Give the routers the experts of a micro-batch, None for none. Call it before the forward pass.

    trained: returns [tokens of this rank] float64, 1 for those with a loss, which are counted; None: count nothing, as
    in passes without a backward pass.
    """
    layers = routings(model)
    _set_targets(layers, experts, trained() if layers and trained else None)


def end(model: torch.nn.Module, experts: Experts | None, output: Any) -> Experts:
    """Call it after the forward pass; returns the experts that the routers chose themselves.

    Registers hooks on ``output`` that give the experts to the routers again when the backward pass of the micro-batch
    begins, for the forward pass that it recomputes.
    """
    layers = routings(model)
    if any(layer.routed for layer in layers):
        _count_used(layers)
    if layers:

        def again(gradient: torch.Tensor) -> torch.Tensor:
            _set_targets(layers, experts, counted=None)
            return gradient

        for tensor in output if isinstance(output, tuple) else (output,):
            if tensor.requires_grad:
                tensor.register_hook(again)
    return {layer.layer: layer.own for layer in layers if layer.own is not None}


def _count_used(layers: list[LayerRouting]) -> None:
    """Add a micro-batch to the ``used`` of the layers of a chunk, in a few operations for all of them together."""
    trained = layers[0].counted
    assert trained is not None
    noted = [(layer, *layer.routed) for layer in layers if layer.routed is not None]
    assert len(noted) == len(layers)
    chosen = torch.stack([chosen for _, _, chosen in noted])  # [layers, t, top_k]
    probabilities = torch.stack([layer.distribution(scores) for layer, scores, _ in noted])  # [layers, t, experts]
    weights = trained[:, None].expand(chosen.shape[1:]).flatten().expand(len(noted), -1)
    loads = weights.new_zeros(len(noted), probabilities.size(2)).scatter_add_(1, chosen.flatten(1).long(), weights)
    entropies = torch.special.entr(probabilities).sum(2).double() @ trained
    counted = torch.cat([loads, entropies[:, None], trained.sum().expand(len(noted), 1)], 1)
    layers[0].used = counted if layers[0].used is None else layers[0].used + counted
    for layer in layers:
        layer.routed = None


def _set_targets(layers: list[LayerRouting], experts: Experts | None, counted: torch.Tensor | None) -> None:
    for layer in layers:
        layer.target = None if experts is None else experts[layer.layer]
        layer.counted = counted


def count(models: Sequence[torch.nn.Module], device: torch.device) -> torch.Tensor | None:
    """[layers + 1, experts + 2] float64, counts since the last call, over all ranks: the argument of `metrics`.

    A row for each layer of the whole model: how often the trained tokens chose each expert; the sum of the entropies of
    the router, in nats; the number of trained tokens. The last row has `LayerRouting.agreement`, summed over layers.
    Collective over all ranks. None for a model without experts.
    """
    config: Any = models[0].config
    if config.num_moe_experts is None:
        return None
    total = torch.zeros(config.num_layers + 1, config.num_moe_experts + 2, dtype=torch.float64, device=device)
    for layers in (routings(model) for model in models):
        used = layers[0].used if layers else None
        for place, layer in enumerate(layers):
            if layer.agreement is not None:
                total[-1, :4] += layer.agreement
            if used is not None:
                total[layer.layer - 1] = used[place]
            layer.agreement = layer.used = None
    dist.all_reduce(total)
    return total


def metrics(counts: torch.Tensor, detail: bool) -> dict[str, Any]:
    """Metrics from `count`, on the host; those of a layer end with ``/layer_01``, without that they are means.

    ``experts/largest_load``: choices of the most used expert, as a multiple of what it had if all were used alike.
    ``experts/unused_fraction``: share of the experts that no trained token chose. ``router/entropy``: nats.
    ``routing/disagreement``: share of the experts given to trained tokens that the routers themselves would not have
    chosen; ``routing/tokens_differ``: share of these tokens, in a layer, for which at least one differs. detail:
    whether to add the choices of all experts, ``experts_load``.
    """
    differ, given, tokens_differ, tokens = counts[-1, :4].tolist()
    found: dict[str, Any] = {}
    if given:
        found = {"routing/disagreement": differ / given, "routing/tokens_differ": tokens_differ / tokens}
    layers = [number for number, row in enumerate(counts[:-1].tolist(), 1) if row[-1]]
    if not layers:
        return found
    used = counts[[number - 1 for number in layers]]
    loads = used[:, :-2]
    parts = {
        "experts/largest_load": loads.amax(1) / loads.mean(1),
        "experts/unused_fraction": (loads == 0).double().mean(1),
        "router/entropy": used[:, -2] / used[:, -1],
    }
    for name, values in parts.items():
        found[name] = values.mean().item()
        found |= {f"{name}/layer_{number:02d}": value for number, value in zip(layers, values.tolist(), strict=True)}
    if detail:
        found["experts_load"] = {"layers": layers, "counts": loads.long().tolist()}
    return found
