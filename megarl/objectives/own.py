"""Objectives in a file of the user's own: what such a class must be, and a trial of it before a run."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import torch

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives.objective import Objective
from megarl.objectives.parts.terms import Terms
from megarl.own_file import describe, file_of, load

SETTING = "objective.path"
FIRST, SECOND = slice(0, 4), slice(4, 8)  # the made-up responses


def load_objective(path: str) -> type[Objective]:
    """The class at ``path``, FILE.py:CLASS; `UserError` unless it is a frozen dataclass that derives from `Objective`,
    defines a rule or terms, and has settings with defaults that a recipe can hold."""
    cls, here = load(path, SETTING), f"{SETTING} = {path!r}"
    if not (isinstance(cls, type) and issubclass(cls, Objective) and cls is not Objective):
        raise UserError(f"{here}: expected a class that derives from megarl.objectives.Objective")
    if not is_dataclass(cls) or "__dataclass_params__" not in vars(cls):
        raise UserError(f"{here}: the class needs the decorator @dataclass(frozen=True)")
    if cls.rule is Objective.rule and cls.terms is Objective.terms:
        raise UserError(f"{here}: the class has neither a method rule nor a method terms, which define its loss")
    if cls.statistics is not Objective.statistics and not cls.needs_statistics:
        raise UserError(f"{here}: the class has a method statistics, which is called only with needs_statistics = True")
    for setting in fields(cls):
        if not isinstance(setting.default, bool | int | float | str):
            raise UserError(f"{here}: the setting {setting.name} needs a default: a number, true or false, or a text")
    return cls


def try_objective(objective: Objective, path: str) -> None:
    """Compute loss and gradient of two made-up responses; `UserError` for what a run could not use."""
    batch = _made_up()
    log, before = batch.logprobs, _made_up()
    try:
        statistics = objective.statistics(batch.detach()) if objective.needs_statistics else None
        terms = objective(batch, statistics)
        if (problem := _problem(terms, batch)) is None:
            (gradient,) = torch.autograd.grad(terms.loss.sum(), log)
            if not torch.isfinite(gradient).all():
                problem = f"the gradient is not finite: {gradient.tolist()}"
            elif not batch.advantages.equal(before.advantages):
                problem = "it changes the batch, which others read after it: work on copies"
            elif any(
                not torch.allclose(terms.loss[mine], objective(_changed(batch, others), statistics).loss[mine], 1e-3)
                for mine, others in ((FIRST, SECOND), (SECOND, FIRST))
            ):
                problem = (
                    "the loss of a response depends on another one, and so on the split into micro-batches: sums over "
                    "a response begin anew at each of cu_seqlens"
                )
    except Exception as error:
        problem = describe(error, file_of(path))
    if problem is not None:
        raise UserError(f"{SETTING} = {path!r}, tried on two made-up responses: {problem}")


def _made_up() -> TokenBatch:
    """Two responses of three trained tokens, each after a token of the prompt whose log-probs are NaN."""
    nan = float("nan")
    logprobs = torch.tensor([nan, -1.0, -0.5, -2.0, nan, -0.1, -3.0, -1.0], requires_grad=True)
    rollout = torch.tensor([nan, -1.0, -1.5, -0.5, nan, -0.4, -1.0, -1.0])
    return TokenBatch(
        logprobs=logprobs,
        rollout_logprobs=rollout,
        advantages=torch.tensor([1.0] * 4 + [-1.0] * 4),
        loss_mask=~rollout.isnan(),
        cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32),
        old_logprobs=rollout + 0.1,
        ref_logprobs=rollout - 0.1,
        entropy=torch.ones(8),
    )


def _changed(batch: TokenBatch, tokens: slice) -> TokenBatch:
    """The batch with other log-probs at these tokens."""
    shift = torch.zeros(8)
    shift[tokens] = -0.7
    return replace(batch, logprobs=batch.logprobs + shift, rollout_logprobs=batch.rollout_logprobs + shift / 2)


def _problem(terms: Terms, batch: TokenBatch) -> str | None:
    if not isinstance(terms, Terms):
        return f"it returned a {type(terms).__name__}, expected megarl.objectives.Terms"
    if lacks := {"loss", "ratio/mean", "kept_fraction"} - terms.metrics.keys():
        return f"its metrics lack {min(lacks)!r}: return what megarl.objectives.make_terms makes of loss and kept"
    for name, pair in terms.metrics.items():
        if not (isinstance(pair, tuple) and [getattr(x, "shape", None) for x in pair] == [torch.Size()] * 2):
            return f"the metric {name!r} is not (sum, count), two tensors of one number each"
    loss, kept, size = terms.loss, terms.kept, batch.logprobs.shape
    if loss.shape != size or loss.dtype != torch.float32:
        return f"the loss is {loss.dtype} {list(loss.shape)}, expected torch.float32 {list(size)}, one for each token"
    if kept.shape != size or kept.dtype != torch.bool:
        return f"kept is {kept.dtype} {list(kept.shape)}, expected torch.bool {list(size)}"
    if not torch.isfinite(loss).all():
        mask = batch.loss_mask.tolist()
        return f"the loss is not finite: {loss.tolist()}; loss_mask is {mask}, and log-probs outside it are NaN"
    return None
