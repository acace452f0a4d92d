"""Objectives in other trainers: padded batches, the packages that an import needs, and the examples."""

from __future__ import annotations

import inspect
import json
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megarl.batch import TokenBatch
from megarl.objectives import OBJECTIVES, build_objective, padded_statistics, padded_terms
from tests.helpers import ROOT

LENGTHS = (5, 3, 1, 4)


def padded() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    rows, columns = len(LENGTHS), max(LENGTHS) + 2
    mask = torch.arange(columns) < torch.tensor(LENGTHS)[:, None]
    rollout = -3 * torch.rand(rows, columns, generator=g)
    logprobs = torch.where(mask, rollout + torch.randn(rows, columns, generator=g), torch.nan)
    return {
        "logprobs": logprobs.requires_grad_(),
        "rollout_logprobs": rollout,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        "mask": mask.long(),
        "old_logprobs": rollout + 0.1,
    }


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padded_batch_has_the_terms_of_the_packed_one(name: str) -> None:
    data, objective = padded(), build_objective(name, {})
    mask, lengths = data["mask"].bool(), torch.tensor(LENGTHS)
    packed = TokenBatch(
        logprobs=data["logprobs"].detach()[mask].requires_grad_(),
        rollout_logprobs=data["rollout_logprobs"][mask],
        advantages=data["advantages"].repeat_interleave(lengths),
        loss_mask=torch.ones(sum(LENGTHS), dtype=torch.bool),
        cu_seqlens=torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32),
        old_logprobs=data["old_logprobs"][mask],
    )
    ours, theirs = padded_terms(objective, **data), objective(packed)
    assert (ours.loss[~mask] == 0).all() and not ours.kept[~mask].any()
    torch.testing.assert_close(ours.loss[mask], theirs.loss)
    assert torch.equal(ours.kept[mask], theirs.kept)
    (gradient,) = torch.autograd.grad(ours.loss.sum(), data["logprobs"])
    (expected,) = torch.autograd.grad(theirs.loss.sum(), packed.logprobs)
    torch.testing.assert_close(gradient[mask], expected)
    assert (gradient[~mask] == 0).all()
    for key, (total, count) in theirs.metrics.items():
        assert [float(x) for x in ours.metrics[key]] == pytest.approx([float(total), float(count)]), key


@pytest.mark.parametrize(
    ("name", "fields"), [("m2po", {"m2_threshold": 0.2}), ("bapo", {}), ("prefix_filter", {"filter_fraction": 0.3})]
)
def test_micro_batches_with_the_statistics_of_all_have_the_terms_of_the_whole_batch(name: str, fields: dict) -> None:
    data, objective = padded(), build_objective(name, fields)
    whole, statistics = padded_terms(objective, **data), padded_statistics(objective, **data)
    parts = [{key: value[rows] for key, value in data.items()} for rows in (slice(0, 1), slice(1, 4))]
    found = [padded_terms(objective, **part, statistics=statistics) for part in parts]
    assert torch.equal(torch.cat([part.loss for part in found]), whole.loss)
    assert torch.equal(torch.cat([part.kept for part in found]), whole.kept)
    alone = torch.cat([padded_terms(objective, **part).loss for part in parts])
    assert not torch.equal(alone, whole.loss), "this batch cannot tell whose statistics are used"


def test_importing_objectives_needs_torch_alone() -> None:
    code = """
import json, sys, torch
sys.modules["numpy"] = None  # which torch can do without
before = {name.partition(".")[0] for name in sys.modules}
import megarl.objectives
found = {name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
print(json.dumps(sorted(found)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(result.stdout) == ["megarl"]


# what `ppo_loss` of verl-project/verl 1dda039b9, verl/workers/utils/losses.py, passes by keyword
VERL = ["old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights"]


def test_verl_example_computes_the_loss_that_verl_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl is not installed: stand-ins written after its source replace its registry and its sum over tokens."""
    registered = {}

    def agg_loss(loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor):
        assert loss_agg_mode == "token-mean"
        return (loss_mat * loss_mask).sum() / batch_num_tokens * dp_size

    register = lambda name: lambda f: registered.setdefault(name, f)  # noqa: E731
    core = SimpleNamespace(agg_loss=agg_loss, register_policy_loss=register)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", core)
    runpy.run_path(str(ROOT / "examples/library/verl_loss.py"))
    loss = registered["megarl"]
    assert list(inspect.signature(loss).parameters) == VERL
    sizes = {"dp_size": 2, "batch_num_tokens": 26, "global_batch_size": 8, "loss_scale_factor": None}
    data, config = padded(), SimpleNamespace(global_batch_info=sizes)
    mask = data["mask"]
    tensors = (data["rollout_logprobs"], data["logprobs"], data["advantages"][:, None].expand(mask.shape), mask)
    arguments = dict(zip(VERL, (*tensors, "token-mean", config), strict=False))
    value, metrics = loss(**arguments, rollout_is_weights=None)
    objective = build_objective("mu_grpo", {"veto_threshold": 1e-4})
    expected = padded_terms(objective, **{k: v for k, v in data.items() if k != "old_logprobs"}).loss.sum() / 13
    assert float(value) == pytest.approx(float(expected))
    assert 0 < metrics["actor/kept_fraction"] <= 1
    with pytest.raises(ValueError, match="rollout_is"):
        loss(**arguments, rollout_is_weights=mask.float())


def test_plain_loop_example_learns() -> None:
    main = runpy.run_path(str(ROOT / "examples/library/plain_loop.py"))["main"]
    assert main() > 0.6
