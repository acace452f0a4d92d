"""The kernels of csrc/cuda on the rehearsal device, with fibres as threads.

`tests/rehearsal/test_rehearsals.py` also runs `tests/kernels/test_gpu.py` for them. Triton's are in
`tests/kernels/interpreted`, and on this device in `test_updates.py`.
"""

import ctypes

import pytest
import torch

from megarl.kernels import library
from tests.kernels.test_gpu import CASES, LENGTHS, gradient, on_device
from tests.kernels.test_token_pass import make_batch

OBJECTIVES = ("mu_grpo", "mu_grpo-suffix-0.3-0.1-1.5", "m2po", "gspo", "bapo")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_results_do_not_depend_on_the_order_of_threads(name):
    """Finds missing barriers: the threads of a block run one after another, at first in order, then in reverse."""
    batch, objective = on_device(make_batch(LENGTHS)), CASES[name]
    forwards = gradient(objective, batch, "cuda")
    library.load_library("cuda").rehearsal_reverse_threads(ctypes.c_int(1))
    backwards = gradient(objective, batch, "cuda")
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))
