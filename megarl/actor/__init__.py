"""The training side: the only package that imports megatron.core."""

import torch
from megatron.core import jit

if not torch.cuda.is_available():
    jit.disable_jit_fuser()  # Megatron decides when it is imported whether to use torch.compile
