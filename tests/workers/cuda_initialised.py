"""A warm process in which an import has initialised CUDA, as Transformer Engine's does on a machine with GPUs."""

import sys
from multiprocessing.connection import Connection

import torch

from megarl.workers.warm import Imports, be_warm_process

if __name__ == "__main__":
    torch.cuda.is_initialized = lambda: True
    be_warm_process(Connection(int(sys.argv[1])), Imports(iter(())))
