"""Flash attention 3 through torch's own switch, with a stand-in for its kernels."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.actor.conftest import make_recipe, read_settings

HERE = Path(__file__).parents[1]
ACTOR = {"backend": "cuda", "kernels": "torch", "flash_attention": 3}


def attended(window: tuple[int, int], sinks: bool) -> list[torch.Tensor]:
    """Output and gradients for two sequences, of queries with two heads a key."""
    from megarl.actor.flash import FlashAttention

    torch.manual_seed(0)
    shapes = ((7, 4, 16), (7, 2, 16), (7, 2, 16), (4,))
    inputs = [torch.randn(shape).bfloat16().cuda().requires_grad_() for shape in shapes]
    ends = torch.tensor([0, 2, 7], dtype=torch.int32).cuda()
    query, key, value, offsets = inputs
    more = None, offsets if sinks else None, (ends, ends, 5, 5), window, 0.25
    out = FlashAttention.apply(query, key, value, *more)
    gradients = torch.autograd.grad(out, inputs[: 3 + sinks], torch.randn(out.shape).bfloat16().cuda())
    return [x.float().cpu() for x in (out, *gradients)]


def test_the_actors_model_switches_every_call_of_flash_attention(monkeypatch, tmp_path):
    from megarl.actor import parallel
    from megarl.actor.model import build_model
    from tests.rehearsal.device import lib
    from tests.rehearsal.updates import join

    join(0, 1, "cuda", tmp_path / "meeting")
    recipe = make_recipe(actor=ACTOR)
    parallel.build_groups(recipe, gloo=False)
    cases = [((-1, 0), False), ((2, 0), False), ((2, 0), True)]
    second = [attended(*case) for case in cases]
    assert "flash_attn_3::fwd" not in lib.launches()
    monkeypatch.syspath_prepend(HERE / "flash3")
    build_model(read_settings(tmp_path, "qwen3"), recipe)
    third = [attended(*case) for case in cases]
    assert [lib.launches()[f"flash_attn_3::{way}"] for way in ("fwd", "bwd")] == [len(cases)] * 2
    for ours, right in zip(third, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))


def test_what_it_lacks_is_refused_before_a_run(monkeypatch):
    from megarl.errors import UserError
    from megarl.planner.preflight import check_devices

    recipe, other = (make_recipe(actor=dict(ACTOR, backend=backend)) for backend in ("cuda", "cpu"))
    with pytest.raises(UserError, match='flash_attention = 3 is for backend = "cuda" and layers = "torch"'):
        check_devices(other)
    with pytest.raises(UserError, match="flash_attention = 3 needs the package flash-attn-3"):
        check_devices(recipe)
    monkeypatch.syspath_prepend(HERE / "flash3")
    importlib.invalidate_caches()
    check_devices(recipe)
    assert "flash_attn_interface" not in sys.modules
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(UserError, match=r"compute capability 9\.0 .*, not 10\.0; use 2"):
        check_devices(recipe)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(UserError, match=r"needs torch 2\.13 or newer, not 2\.12\.1"):
        check_devices(recipe)
