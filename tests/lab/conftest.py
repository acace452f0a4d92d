import pytest

from lab.results import Sweep
from lab.tables import read_all
from tests.helpers import ROOT


@pytest.fixture(scope="session")
def sweeps() -> dict[str, Sweep]:
    """The committed results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return read_all()
