import contextlib

import pytest

from megarl.planner.parameter_counts import ParameterCounter


@pytest.fixture(scope="session")
def counter():
    with ParameterCounter() as counter:
        yield counter


@pytest.fixture
def shared_counter(counter, monkeypatch):
    """Commands count with ``counter``, too: a process of their own would first import Megatron."""
    monkeypatch.setattr("megarl.planner.fit.ParameterCounter", lambda: contextlib.nullcontext(counter))
