import contextlib
import multiprocessing
from unittest import mock

import pytest

from megarl.planner import parameter_counts


@pytest.fixture(scope="session")
def counter():
    """It counts in a fork of the process that has imported Megatron, not in a new interpreter."""
    fork = multiprocessing.get_context("forkserver")
    with (
        mock.patch.object(parameter_counts, "get_context", return_value=fork),
        parameter_counts.ParameterCounter() as counter,
    ):
        yield counter


@pytest.fixture
def shared_counter(counter, monkeypatch):
    """Commands count with ``counter``, too: a process of their own would first import Megatron."""
    monkeypatch.setattr("megarl.planner.fit.ParameterCounter", lambda: contextlib.nullcontext(counter))
