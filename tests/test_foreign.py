"""Limits on text and numbers from outside: one clear error, whatever somebody sends."""

import json

import pytest

from megarl.errors import UserError
from megarl.foreign import DEEPEST, escape, parse_json, parse_toml, read_file, shown
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import load_recipe, parse_override

TOO_DEEP = "nested more than 64 deep"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, TOO_DEEP),
        ('{"a":' * 65 + "1" + "}" * 65, TOO_DEEP),
        ("[1, {" + f'"a": {1 << 63}' + "}]", "does not fit into 64 bits"),
        ("1" * 1_000_000, "digits"),
        ("{", "line 1"),
        (b"\xff", "utf-8"),
    ],
)
def test_json_beyond_the_limits_is_one_clear_error(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "1" * 5_000, "digits"),
        ("a = 0x" + "f" * 100_000, "does not fit into 64 bits"),
        ("a = " + "[" * 70 + "]" * 70, TOO_DEEP),
        (".".join("a" * 70) + " = 1", TOO_DEEP),
        ("a = ", "Invalid value"),
    ],
)
def test_toml_beyond_the_limits_is_one_clear_error(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse_toml(text)
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UserError, match=rf"r.toml is not valid TOML: .*{message}"):
        load_recipe(tmp_path / "r.toml")
    if message != "Invalid value" and text.startswith("a = "):
        with pytest.raises(UserError, match=f"--set a.b: .*{message}"):
            parse_override(f"a.b={text[4:]}")


def test_what_is_within_the_limits_is_read_as_it_is():
    nested = json.loads("[" * DEEPEST + "]" * DEEPEST)
    value = {"a": [1, -2.5, True, None, "x" * 100_000, (1 << 63) - 1, -(1 << 63) + 1], "nested": nested[0]}
    assert parse_json(json.dumps(value)) == value
    assert parse_json(b"[1]") == [1] and parse_toml("a.b = [1, 2]") == {"a": {"b": [1, 2]}}


def test_a_models_settings_beyond_the_limits_and_too_large_files_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": ' + "1" * 5_000 + "}")
    with pytest.raises(UserError, match=r"config.json is not valid JSON: .*digits"):
        read_hf_config(tmp_path)
    with open(tmp_path / "a", "wb") as file:
        file.truncate(1 << 40)  # takes no space; reading it would take all memory
    with pytest.raises(ValueError, match="larger than 16 MiB"):
        read_file(tmp_path / "a")
    (tmp_path / "a").write_bytes(b" " * (16 << 20))
    assert len(read_file(tmp_path / "a")) == 16 << 20


def test_anything_can_be_shown():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(10**5000) == "a int that is too large to show" and "too large" in shown(deep)
    assert shown("x" * 100) == "'" + "x" * 59


def test_characters_that_control_a_terminal_are_escaped():
    assert escape("\x1b[2J\u202eé\u009b\ud800\ttab\n") == "\\x1b[2J\\u202eé\\x9b\\ud800\ttab\n"
    assert escape("a\nb", newlines=False) == "a\\nb"
