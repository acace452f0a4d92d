"""Time and memory of the commands that look inside a run, on a run of a million responses and 4e9 tokens.

    python benchmarks/large_run.py [--responses 1000000] [--tokens 4000] [--keep DIR]

The run is made by the store's own writer, with a ledger, a seal, checksums and a line of metrics per update, so that
`megarl audit --samples 0` finds no problem. Rewards and log-probs are made up, which `megarl audit` reports. All tokens
are 0 except the first few of a prompt's first response, and blocks of zeros are holes in sparse files. So 32 GB of
shards take a fraction of the disk, but are read like those of a real run. Memory is the largest resident set of the
command's process, which includes pages of mapped files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import pyarrow as pa

from megarl.data.prompts import open_prompts
from megarl.recipe.load import load_recipe
from megarl.storage.checked_json import append_json
from megarl.storage.ledger import LedgerEntry
from megarl.storage.metrics.summary import ages, summary
from megarl.storage.policies import copy_policy
from megarl.storage.rollouts import Group, Response, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import RunDir, Stage

SAMPLES, GROUPS_A_SHARD, GROUPS_AN_UPDATE = 8, 125, 125
TEXT = 64  # tokens that are not 0, in the first response to each prompt
BLOCK = 4096  # bytes
SQL = {
    "by reward": "select reward, count(*), avg(length) from responses group by reward order by reward",
    "sort": "select prompt, sample, length from responses order by length desc, prompt, sample limit 5",
    "all log-probs": "select sum(list_sum(rollout_logprobs)) from responses",
    "text": "select prompt, decode(response_tokens) as text from responses where prompt < 3 and sample = 0",
}


# a small process that starts the command: a child inherits the peak memory of the process that starts it
WATCH = """
import json, os, sys, time
start = time.perf_counter()
out = os.dup(2)
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, 1, 2)])
_, status, usage = os.wait4(pid, 0)
os.write(out, json.dumps([os.waitstatus_to_exitcode(status), time.perf_counter() - start, usage.ru_maxrss]).encode())
"""


class SparseWriter(RolloutWriter):
    """Writes shards as sparse files, with holes for blocks of zeros."""

    def _write_shard(self, name: str, payload: pa.Buffer) -> None:
        data = np.frombuffer(payload, np.uint8)
        blocks = len(data) // BLOCK
        used = data[: blocks * BLOCK].reshape(blocks, BLOCK).any(1)
        with open(self.directory / name, "wb") as file:
            file.truncate(len(data))
            for block in np.flatnonzero(used).tolist():
                file.seek(block * BLOCK)
                file.write(data[block * BLOCK : (block + 1) * BLOCK])
            file.seek(blocks * BLOCK)
            file.write(data[blocks * BLOCK :])


def make_run(root: Path, model: Path, responses: int, tokens: int) -> RunDir:
    """A run with one finished stage of ``responses`` responses of ``tokens`` tokens on average."""
    root.mkdir(parents=True)
    words = root.with_name(f"{root.name}.jsonl")
    words.write_text("".join(f'{{"prompt": "{word}", "answer": "a"}}\n' for word in _words()))
    groups = responses // SAMPLES
    recipe = root.with_name(f"{root.name}.toml")
    recipe.write_text(
        f"""
        [model]
        path = "{model}"
        [data]
        source = "file"
        train = "{words}"
        prompt_template = "{{prompt}}="
        max_prompt_tokens = 8
        [reward]
        kind = "exact"
        [rollout]
        max_response_tokens = {2 * tokens}
        responses_per_prompt = {SAMPLES}
        groups_per_chunk = {GROUPS_A_SHARD}
        [schedule]
        stages = 1
        updates_per_stage = {groups // GROUPS_AN_UPDATE}
        prompts_per_update = {GROUPS_AN_UPDATE}
        [objective]
        name = "mu_grpo"
        [optimizer]
        lr = 1e-4
        [actor]
        backend = "cpu"
        [eval]
        every = 0
        [run]
        tensorboard = false
        """
    )
    run = RunDir.create(root, load_recipe(recipe))
    stage = run.stage(0)
    info = copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, stage.policy)
    stage.log_event("weight_drift", phase="rollout", max=0.0)
    with SparseWriter(stage.rollouts, weights_hash=info.weights_hash, logprob_mode="processed") as writer:
        for shard in _shards(stage, tokens):
            writer.append(shard)
            append_json(run.metrics, _line(stage, shard))
    seal(stage.rollouts, stage.groups)
    return run


def _words() -> list[str]:
    letters = "abcdefgh"
    return [a + b + c + d for a in letters for b in letters for c in letters for d in letters]


def _shards(stage: Stage, tokens: int) -> Iterator[list[Group]]:
    _, prompts = open_prompts(stage.run.recipe, stage.policy)
    noise = np.random.default_rng(0)
    nothing, certain = np.zeros(2 * tokens, np.int32), np.zeros(2 * tokens, np.float32)
    for first in range(0, len(stage.groups), GROUPS_A_SHARD):
        groups = []
        for group in range(first, min(first + GROUPS_A_SHARD, len(stage.groups))):
            lengths = noise.integers(tokens // 2, tokens * 3 // 2, SAMPLES)
            rewards = noise.integers(0, 2, SAMPLES)
            texts = [nothing[:length] for length in lengths]
            texts[0] = texts[0].copy()
            texts[0][:TEXT] = noise.integers(3, 29, TEXT)
            found = zip(texts, rewards.tolist(), strict=True)
            responses = tuple(Response(text, certain[: len(text)], float(r), "stop", 0) for text, r in found)
            groups.append(Group(group, np.array(prompts.train(group).tokens, np.int32), responses))
        yield groups


def _line(stage: Stage, groups: list[Group]) -> dict[str, Any]:
    """An update's line of metrics, with the metrics that the audit recomputes."""
    update = groups[0].group_id // GROUPS_AN_UPDATE
    trained = sum(len(response.tokens) for group in groups for response in group.responses)
    prompts = sum((len(group.prompt_tokens) - 1) * len(group.responses) for group in groups)
    counts = {"tokens": trained + prompts, "trained_tokens": trained}
    return {"stage": 0, "update": update + 1} | ages(stage, update, groups) | summary(groups) | counts


def measure(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a ``megarl`` command and measure its time and largest resident set; its output is printed."""
    sys.stdout.flush()
    command = [sys.executable, "-S", "-c", WATCH, sys.executable, "-m", "megarl.cli", *arguments]
    code, seconds, kilobytes = json.loads(subprocess.run(command, check=True, stderr=subprocess.PIPE).stderr)
    return {"command": name, "seconds": seconds, "peak MiB": kilobytes / 1024, "exit code": code}


def measure_all(root: Path) -> list[dict[str, Any]]:
    run = str(root)
    rows = [
        measure("samples", ["samples", run]),
        measure("samples --prompt", ["samples", run, "--prompt", "77"]),
        measure("samples --reward", ["samples", run, "--reward", "1", "--limit", "3"]),
        measure("samples, no match", ["samples", run, "--reward", "2:"]),
    ]
    rows += [measure(f"sql, {name}", ["sql", run, query]) for name, query in SQL.items()]
    rows.append(measure("audit --samples 0", ["audit", run, "--samples", "0"]))
    return [*rows, measure("audit", ["audit", run])]


def size_of(stage: Stage) -> dict[str, Any]:
    entries: list[LedgerEntry] = RolloutStore(stage.rollouts).entries
    files = [(stage.rollouts / entry.shard).stat() for entry in entries]
    return {
        "responses": sum(entry.responses for entry in entries),
        "tokens": sum(entry.tokens for entry in entries),
        "shards GB": sum(file.st_size for file in files) / 1e9,
        "on disk GB": sum(file.st_blocks * 512 for file in files) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--responses", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=4000, help="of a response, on average")
    parser.add_argument("--keep", type=Path, help="directory to keep the run in; if it exists, the run in it is used")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megarl-large-run-") as scratch:
        root = options.keep or Path(scratch) / "run"
        if not root.exists():
            model = Path(f"{root}.model")
            _write_model(model)
            make_run(root, model, options.responses, options.tokens)
        facts = size_of(RunDir.open(root).stage(0))
        common.write_table("large_run", [facts | row for row in measure_all(root)])


def _write_model(path: Path) -> None:
    sys.path.insert(0, str(common.ROOT / "examples/quickstart"))
    from make_base import write_initial_model

    write_initial_model(path)


if __name__ == "__main__":
    main()
