"""The training side: the only package that imports megatron.core."""

import torch
from megatron.core import jit

if not torch.cuda.is_available():
    jit.disable_jit_fuser()  # first: Megatron's modules decide when they are imported whether to use torch.compile
