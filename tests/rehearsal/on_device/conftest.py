"""Tests that run where torch sees the rehearsal device, each in a fork; `../test_rehearsals.py` starts them."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("MEGARL_REHEARSAL") == "1" else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run each test in a fork, so that it initialises CUDA anew, as the processes of a phase do."""
    from tests.rehearsal.forks import in_fork

    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    in_fork(lambda: pyfuncitem.obj(**arguments))
    return True
