"""Stands for the package that vLLM brings along: when it is imported it asks CUDA for all devices."""

import torch

for number in range(torch.cuda.device_count()):
    torch.cuda.get_device_capability(number)
