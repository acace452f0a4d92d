"""The tokenizer is read from a directory, without running its code, and checked against the model."""

import contextlib
import json

import pytest

from megarl.data.tokenizer import check_tokenizer_fits, load_tokenizer, stop_token_ids
from megarl.errors import UserError
from tests.data.prompt_sources import char_tokenizer


def model_dir(path, **config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_tokenizer_is_loaded_from_a_directory_which_must_have_one(tmp_path):
    char_tokenizer(tmp_path / "t")
    assert load_tokenizer(tmp_path / "t").decode([2, 3]) == "ab"
    with pytest.raises(UserError, match=r"gone is not a directory; set model\.path or model\.tokenizer"):
        load_tokenizer(tmp_path / "gone")
    (tmp_path / "t/tokenizer.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for unreadable in ("t", "empty"):
        with pytest.raises(UserError, match="cannot read a tokenizer from"):
            load_tokenizer(tmp_path / unreadable)


def test_code_of_a_tokenizer_is_never_run(tmp_path, monkeypatch):
    char_tokenizer(tmp_path / "t")
    config = json.loads((tmp_path / "t/tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "t/tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "t/evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask for consent
    with contextlib.suppress(UserError):
        load_tokenizer(tmp_path / "t")
    assert not (tmp_path / "ran").exists()


def test_token_ids_must_be_below_vocab_size(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "t")
    largest, model = len(tokenizer) - 1, model_dir(tmp_path / "eos", eos_token_id=900)
    check_tokenizer_fits(tokenizer, tmp_path / "t", largest + 1)
    with pytest.raises(UserError, match=rf"largest token id is {largest}, .* vocab_size = {largest};"):
        check_tokenizer_fits(tokenizer, tmp_path / "t", largest)
    with pytest.raises(UserError, match="stop token id 900 is not below vocab_size = 100"):
        check_tokenizer_fits(tokenizer, model, 100)


def test_stop_tokens_are_collected_from_all_files(tmp_path):
    tokenizer = char_tokenizer(tmp_path / "t")
    model = model_dir(tmp_path / "m", eos_token_id=7)
    assert stop_token_ids(tokenizer, model) == (1, 7)
    (model / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert stop_token_ids(tokenizer, model) == (1, 7, 9)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no stop token"):
        check_tokenizer_fits(tokenizer, model_dir(tmp_path / "none"), 100)
