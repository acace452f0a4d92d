"""Copies of a model: their tokenizers render as the source's does, with tools and without."""

import itertools
import shutil

import pytest

from megarl.commands.stages.pack import check_name, copy_policy_files
from megarl.data.prompts import _tokenizer_content
from megarl.data.tokenizer import load_tokenizer
from megarl.storage.policies import check_policy, copy_policy, read_info
from tests.data.test_templates import CHAT, bpe
from tests.helpers import write_untrained_model

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
TEMPLATES = {
    "one": "ONE " + CHAT,
    "two": {"default": "DEFAULT " + CHAT, "tool_use": "TOOLS " + CHAT},
    "three": {"default": "A " + CHAT, "tool_use": "B " + CHAT, "rag": "C " + CHAT},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models that differ in their tokenizers' chat templates, by name."""
    folder = tmp_path_factory.mktemp("models")
    write_untrained_model(folder / "bare")
    for file in (folder / "bare").glob("tokenizer*"):
        file.unlink()
    for name, templates in TEMPLATES.items():
        shutil.copytree(folder / "bare", folder / name)
        bpe(chat_template=templates).save_pretrained(folder / name)
    return folder


def rendered(model):
    tokenizer = load_tokenizer(model)
    names = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else [None]
    return {
        (name, bool(tools)): tokenizer.apply_chat_template(
            [{"role": "user", "content": "hi"}], tools=tools, chat_template=name, tokenize=False
        )
        for name in (None, *names)
        for tools in (None, TOOLS)
    }


@pytest.mark.parametrize(("model", "tokenizer"), list(itertools.product(TEMPLATES, TEMPLATES)))
def test_every_copy_renders_as_its_tokenizer_does(models, tmp_path, model, tokenizer):
    """The tokenizer may be another model's, and then nothing of the model's own may remain."""
    copy_policy(models / model, models / tokenizer, tmp_path / "policy")
    copy_policy_files(tmp_path / "policy", tmp_path / "packed", weights=False)  # what an export copies, too
    expected = rendered(models / tokenizer)
    for copy in ("policy", "packed"):
        assert rendered(tmp_path / copy) == expected, copy
        assert _tokenizer_content(tmp_path / copy) == _tokenizer_content(models / tokenizer)


def test_chat_templates_have_checksums_and_may_be_packed(models, tmp_path):
    copy_policy(models / "two", models / "two", tmp_path / "policy")
    names = read_info(tmp_path / "policy").files
    assert "additional_chat_templates/tool_use.jinja" in names
    for name in names:
        check_name(f"policy/{name}")
    with pytest.raises(ValueError, match="name"):
        check_name("policy/other/tool_use.jinja")
    (tmp_path / "policy/additional_chat_templates/tool_use.jinja").write_text("changed")
    with pytest.raises(Exception, match="tool_use.jinja does not match its checksum"):
        check_policy(tmp_path / "policy")


@pytest.mark.parametrize("name", ["spiece.model", "qwen.tiktoken", "tekken.json", "source.spm", "vocab.txt"])
def test_a_tokenizer_of_another_model_is_copied_whatever_its_files_are_called(models, tmp_path, name):
    shutil.copytree(models / "one", tmp_path / "other")
    (tmp_path / "other" / name).write_text("pieces")
    (tmp_path / "other" / "notes.txt").write_text("no part of it")
    copy_policy(models / "two", tmp_path / "other", tmp_path / "policy")
    assert (tmp_path / "policy" / name).read_text() == "pieces"
    assert not (tmp_path / "policy/notes.txt").exists()
