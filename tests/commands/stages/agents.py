"""A tiny model that calls a tool in about half of its turns, and a tokenizer with a chat template."""

import re
import shutil

from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>")
WORDS = ("assistant", "user", "tool", "system", "\n", CALL, *"52+3 ?!", "again", "tools", "add", "?x")
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\ntools{% for t in tools %} {{ t.function.name }}{% endfor %}"
    "<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)


def write_agent_model(source, path):
    """Write a copy of ``source`` that begins a turn with a tool call or an answer, and then mostly stops."""
    shutil.copytree(source, path)
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?x"))
    pieces = "|".join(map(re.escape, sorted(WORDS, key=len, reverse=True)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), "isolated")
    tokenizer.decoder = decoders.Fuse()
    for file in path.glob("tokenizer*"):
        file.unlink()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    embeddings, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embeddings[:, :2] = head[:, :2] = 0
    line, call, five = (vocabulary[word] for word in ("\n", CALL, "5"))
    embeddings[line, 0] = 8.0
    for word in (call, five):
        embeddings[word, 1] = 8.0
        head[word, 0] = 1.0
    head[vocabulary["<|im_end|>"], 1] = 0.9
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
