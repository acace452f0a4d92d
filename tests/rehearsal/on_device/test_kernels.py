"""Kernels on the rehearsal device compared with the definitions on the CPU.

Triton's kernels run in its interpreter, those of csrc/cuda with fibres as threads. `tests/rehearsal/test_rehearsals.py`
also runs `tests/kernels/test_gpu.py` for the CUDA kernels; Triton's interpreter is too slow for its batches, and its
token pass is in `tests/kernels/interpreted`.
"""

import ctypes

import pytest
import torch

from megarl.kernels import library
from megarl.kernels.linear_logprob import definition, linear_logprob
from tests.kernels.test_gpu import CASES, LENGTHS, gradient, on_device
from tests.kernels.test_token_pass import make_batch
from tests.rehearsal.counts import counted

OBJECTIVES = ("mu_grpo", "mu_grpo-suffix-0.3-0.1-1.5", "m2po", "gspo", "bapo")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_results_do_not_depend_on_the_order_of_threads(name):
    """Finds missing barriers: the threads of a block run one after another, at first in order, then in reverse."""
    batch, objective = on_device(make_batch(LENGTHS)), CASES[name]
    forwards = gradient(objective, batch, "cuda")
    library.load_library("cuda").rehearsal_reverse_threads(ctypes.c_int(1))
    backwards = gradient(objective, batch, "cuda")
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_lm_head_equals_the_definition_without_a_wait(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 32, generator=generator).to(dtype) for n in (70, 139))
    targets = torch.randint(0, 131, (70,), generator=generator)
    h, w = (x.double().requires_grad_() for x in (hidden, weight))
    outputs = definition.linear_logprob(h, w, targets, 0.7, 131)
    exact = [*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), (h, w))]
    h, w = (x.cuda().requires_grad_() for x in (hidden, weight))
    targets = targets.cuda()
    with counted() as seen:
        outputs = linear_logprob(h, w, targets, 0.7, vocab_size=131, backend="triton")
        ours = [*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), (h, w))]
    assert not seen.waits
    for a, b in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=0, atol=1e-4)
    step = torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-5
    for a, b in zip(ours[2:], exact[2:], strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=step, atol=2 * step * b.abs().max().item())
