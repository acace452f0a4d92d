import pytest

from tests.rollout.tiny_models import save


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory):
    return save(tmp_path_factory.mktemp("qwen3_moe"))
