"""The rehearsal device: it refuses what a GPU refuses, and counts waits and launches where they happen."""

import pytest
import torch
import torch.distributed as dist

from tests.rehearsal.counts import counted
from tests.rehearsal.forks import in_fork


def test_mixed_devices_are_refused():
    x = torch.ones(4, device="cuda")
    for wrong in (torch.ones(4), torch.ones(4, device="cuda:1"), torch.ones(0)):
        with pytest.raises(RuntimeError, match="same device"):
            torch.cat([x, wrong])
    with pytest.raises(RuntimeError, match="same device"):
        x.index_add_(0, torch.zeros(4, dtype=torch.int64), x)
    with pytest.raises(RuntimeError, match="same device"):
        torch.zeros(()).add_(x.sum())
    with pytest.raises(RuntimeError, match="'cuda' device type for generator"):
        torch.randn(3, device="cuda", generator=torch.Generator())
    assert (x + torch.tensor(1.0)).is_cuda  # a 0-d tensor of the host is an argument of the kernel


def test_error_names_a_missing_operator():
    x = torch.ones(2, 3, 4, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"no aten::_scaled_dot_product_cudnn_attention.*cuda_only.py"):
        torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, False)


def test_waits_and_launches_are_counted():
    x = torch.ones(4, device="cuda")
    with counted() as seen:
        y = x * 2 + 1
        y[1:].view(3, 1).transpose(0, 1)
    assert seen.launch_count == 2 and not seen.waits
    with counted() as seen:
        y.sum().item()
        y.cpu()
        y.to("cpu", non_blocking=True)
        torch.tensor([1.0], device="cuda")
        y[y > 0]
        y.nonzero()
        torch.cuda.synchronize()
    kinds = sorted(place.split(" at ")[0] for place in seen.waits.elements())
    assert kinds == ["aten::nonzero", "aten::nonzero", "copy to the device", "copy to the host", "item", "synchronize"]
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation: item"):
        y.sum().item()


def test_a_fork_cannot_use_cuda_that_its_parent_initialised():
    assert not torch.cuda.is_initialized()
    in_fork(lambda: torch.ones(1, device="cuda"))  # allowed: this process has not initialised CUDA
    torch.ones(1, device="cuda")
    assert torch.cuda.is_initialized()
    with pytest.raises(AssertionError, match="Cannot re-initialize CUDA in forked subprocess"):
        in_fork(lambda: torch.ones(1, device="cuda"))


def test_a_collective_is_unread_until_somebody_waits_for_it():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    whole = torch.arange(4.0, device="cuda")
    work = dist.all_reduce(whole, async_op=True)
    assert whole.isnan().all()
    work.wait()
    assert whole.tolist() == [0, 1, 2, 3]
    gathered, own = torch.zeros(4, device="cuda"), torch.arange(4.0, device="cuda")
    work = dist.all_gather_into_tensor(gathered, own, async_op=True)
    assert gathered.isnan().all() and own.tolist() == [0, 1, 2, 3]
    own += 1
    with pytest.raises(RuntimeError, match="what all_gather reads was changed before anybody waited for it"):
        work.wait()
    dist.all_reduce(whole)  # waits itself
    assert whole.tolist() == [0, 1, 2, 3]


def test_a_copy_to_the_host_is_unread_until_somebody_waits_for_it():
    x = torch.arange(3.0, device="cuda")
    for wait in (torch.cuda.synchronize, torch.cuda.Event().synchronize, torch.cuda.current_stream().synchronize):
        there = x.to("cpu", non_blocking=True)
        assert there.is_pinned() and there.isnan().all()
        wait()
        assert there.tolist() == [0, 1, 2]
    source = torch.arange(3.0).pin_memory()
    back = source.to("cuda", non_blocking=True)
    assert back.tolist() == [0, 1, 2]
    back = source.to("cuda", non_blocking=True)
    source += 1
    with pytest.raises(RuntimeError, match="what a copy reads was changed before anybody waited for it"):
        torch.cuda.synchronize()


def test_random_state_is_restored_and_memory_counted_and_not_empty():
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.rand(3)  # draws from the generator of the host
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    before = torch.cuda.memory_allocated()
    x = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() == before + 4000
    del x
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= before + 4000
    assert torch.empty(3, device="cuda").isnan().all()  # memory that was never written
    assert torch.empty(3, pin_memory=True).is_pinned() and not torch.empty(3).is_pinned()


def test_an_expert_without_tokens_has_no_gradient(monkeypatch):
    """Blackwell leaves its gradient unwritten."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    from megarl.actor.experts import grouped_linear

    tokens = torch.randn(5, 16, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(4, 8, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ends = torch.tensor([2, 2, 5, 5], dtype=torch.int32, device="cuda")
    grouped_linear(tokens, weight, ends).float().square().sum().backward()
    sizes = weight.grad.float().square().sum((1, 2)).cpu()
    assert sizes[1] == sizes[3] == 0 and sizes[0] > 0 and sizes[2] > 0
