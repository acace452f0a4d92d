"""Copies of a model: their tokenizers render as the source's does, with tools and without."""

import json
import shutil

import pytest

from megarl.commands.stages.pack import check_name, copy_policy_files
from megarl.data.prompts import _tokenizer_content
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
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
    names = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else []
    said, render = [{"role": "user", "content": "hi"}], tokenizer.apply_chat_template
    return [render(said, tools=t, chat_template=n, tokenize=False) for n in (None, *names) for t in (None, TOOLS)]


@pytest.mark.parametrize(("model", "tokenizer"), [("one", "one"), ("two", "two"), ("one", "three"), ("three", "one")])
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


NAMES = (  # Qwen, Mistral, GPT-4o's and versioned files; the others are names of transformers' tokenizer classes
    *("qwen.tiktoken", "o200k_base.tiktoken", "tekken.json", "tokenizer.model.v11", "tokenizer.4.0.0.json"),
    *("spiece.model", "sentencepiece.bpe.model", "spm_char.model", "source.spm", "target.spm", "bpe.codes"),
    *("vocab.txt", "vocab-src.json", "target_vocab.json", "entity_vocab.json", "dict.txt", "emoji.json"),
    *("byte_maps.json", "normalizer.json", "prophetnet.tokenizer", "word_shape.json", "word_pronunciation.json"),
)


def test_a_tokenizer_of_another_model_is_copied_whatever_its_files_are_called(models, tmp_path):
    shutil.copytree(models / "one", tmp_path / "other")
    for name in (*NAMES, "notes.txt"):
        (tmp_path / "other" / name).write_text("pieces")
    copy_policy(models / "two", tmp_path / "other", tmp_path / "policy")
    assert [name for name in NAMES if not (tmp_path / "policy" / name).is_file()] == []
    assert not (tmp_path / "policy/notes.txt").exists()


# tokenizer_config.json's class, which it may not name, and the model's type: transformers 5 gives some types classes
# of their own, whatever tokenizer_config.json says
CASES = [("Qwen2Tokenizer", "qwen2"), ("Qwen2Tokenizer", "llama"), ("LlamaTokenizerFast", "glm4_moe"), (None, "phi3")]
CASES += [("GPT2Tokenizer", "deepseek_v3"), ("PreTrainedTokenizerFast", "internlm2"), (None, "qwen3_moe")]


@pytest.mark.parametrize(("name", "model_type"), CASES)
def test_a_tokenizer_that_is_read_otherwise_beside_the_model_is_refused(models, tmp_path, name, model_type):
    """transformers takes the class from config.json too (its issues 30977 and 6368), and thereby other tokens."""
    for part in ("one", "two"):
        shutil.copytree(models / part, tmp_path / part)
    config = json.loads((models / "one" / "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    (tmp_path / "two" / "config.json").unlink()
    settings = json.loads((models / "two" / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    (tmp_path / "two" / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v}))
    text = "I'm 12345  years\n\nold, e\u0301"
    alone = load_tokenizer(tmp_path / "two")
    shutil.copytree(tmp_path / "two", tmp_path / "beside")
    shutil.copy(tmp_path / "one" / "config.json", tmp_path / "beside")
    beside = load_tokenizer(tmp_path / "beside")
    if alone.encode(text) != beside.encode(text):
        said = f"reads it as {type(beside).__name__}, and alone as {type(alone).__name__}"
        with pytest.raises(UserError, match=said):
            copy_policy(tmp_path / "one", tmp_path / "two", tmp_path / "policy")
        assert not (tmp_path / "policy").exists()
        shutil.copy(tmp_path / "one" / "config.json", tmp_path / "two")  # the remedy
    copy_policy(tmp_path / "one", tmp_path / "two", tmp_path / "policy")
    assert load_tokenizer(tmp_path / "policy").encode(text) == beside.encode(text)
    assert rendered(tmp_path / "policy") == rendered(tmp_path / "two")
