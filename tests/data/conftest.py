import pytest

from tests.data.prompt_sources import char_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"))
