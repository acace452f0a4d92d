"""`megarl doctor`: what it says about versions that do not fit each other."""

import json
from importlib import metadata

import pytest
import torch

from megarl.views.doctor import diagnose, driver, glibc, within_range

OPEN = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16-I3)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:30:55 UTC 2026\n"


@pytest.mark.parametrize(
    ("said", "cuda", "expected"),
    [
        (OPEN, "13.0", "570 is too old: torch is built for CUDA 13.0, which needs 580 or newer"),
        (OPEN, "12.8", "570; torch is built for CUDA 12.8"),
        (CLOSED, "13.0", "580; torch is built for CUDA 13.0"),
        (CLOSED, None, "580; torch is a build without CUDA"),
        ("", "13.0", "none of NVIDIA is loaded; torch is built for CUDA 13.0, which needs 580 or newer"),
    ],
)
def test_a_driver_that_is_too_old_for_torch_is_named(said, cuda, expected):
    assert driver(said, cuda) == expected


def test_versions_outside_the_range_of_another_package_are_named():
    assert glibc("2.31") == "2.31; SGLang 0.5.23 needs 2.34 or newer" and glibc("2.36") == "2.36"
    assert within_range("transformer-engine", "2.11.0") == "2.11.0"
    said = within_range("transformer-engine", "2.20.0")
    megatron = f"Megatron-Core {metadata.version('megatron-core')}"
    assert said.startswith("2.20.0, but ") and megatron in said and "<2.1" in said and ">=2.9" in said


def test_this_machine_has_a_line_for_each():
    found = json.loads(diagnose(as_json=True))
    assert torch.__version__.startswith(found["torch"]) and found["glibc"][0].isdigit()  # a wheel may hide its "+cu130"
    assert "CUDA" in found["driver"] and "triton kernels" in found
