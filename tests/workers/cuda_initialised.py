"""A warm process in which an import has initialised CUDA, as Transformer Engine's does on a machine with GPUs."""

import socket
import sys

import torch

from megarl.workers.warm import serve

if __name__ == "__main__":
    torch.cuda.is_initialized = lambda: True
    serve(socket.socket(fileno=int(sys.argv[1])))
