"""The two operators of flash attention, for devices on which this build of torch lacks them."""

import contextlib

import torch

from tests.rehearsal import cuda_only


@contextlib.contextmanager
def flash_attention_on(device):
    """Register those of the rehearsal device for ``device``, a dispatch key of torch such as "CPU"."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", cuda_only._varlen, device)
        library.impl("_flash_attention_backward", cuda_only._varlen_backward, device)
        yield
