import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import sys

import pytest
import torch

from tests.helpers import ROOT, write_recipe

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The quickstart's untrained model and tokenizer."""
    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    try:
        from make_base import write_initial_model
    finally:
        sys.path.pop(0)
    path = tmp_path_factory.mktemp("model") / "model"
    write_initial_model(path)
    return path


@pytest.fixture(scope="module")
def recipe(tiny_model, tmp_path_factory):
    """A tiny run's recipe: a random Qwen3-MoE that should answer with the first letter of a word, seconds a phase."""
    words = ["".join(letters) for letters in itertools.product("abcde", repeat=3)]
    return write_recipe(tmp_path_factory.mktemp("recipe"), tiny_model, words)
