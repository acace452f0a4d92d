"""Wall time of the quickstart's work in megarl and in TRL's GRPOTrainer, end to end, in turns on the same CPUs.

With --check, whether examples/library/trl_trainer.py has TRL's own loss and gradient where the objective is the same.

Both make 288 updates of 16 prompts with 8 responses in three rollouts of 96 updates, of the same model and prompts, in
float32 with one learning rate, with the objective of GRPO (a clip of .2, no KL term), rewards by equality, and write
their result. Neither evaluates. From the start of the command to its end, so imports count on both sides.

TRL needs an environment of its own, since its pins are others:

    python3 -m venv .venv-trl
    .venv-trl/bin/pip install torch==2.13.0 trl==1.16.0
    python examples/quickstart/make_base.py
    python benchmarks/against_trl.py --trl .venv-trl/bin/python [--repeats 3] [--threads 1] [--check]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BASE, RECIPE = Path("examples/quickstart/base"), "examples/quickstart/recipe.toml"
STAGES, UPDATES, PROMPTS, RESPONSES, TOKENS = 3, 96, 16, 8, 10
LR, WARMUP, CLIP = 1e-4, 15, 0.2


def write_prompts(path: Path) -> None:
    """As many words as all stages train, each once."""
    rng, words = random.Random(0), dict[str, None]()
    while len(words) < STAGES * UPDATES * PROMPTS:
        words["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))] = None
    path.write_text("".join(json.dumps({"prompt": f"{word}=", "answer": word[::-1]}) + "\n" for word in words))


def megarl_command(prompts: Path, output: Path) -> list[str]:
    """A run of megarl with its defaults, but without the small rehearsal before it and without evaluations."""
    values: dict[str, Any] = {
        "data.source": "file",
        "data.train": str(prompts),
        "data.options": {},
        "data.prompt_template": "{prompt}",
        "reward.kind": "exact",
        "rollout.max_response_tokens": TOKENS,
        "rollout.responses_per_prompt": RESPONSES,
        "schedule.stages": STAGES,
        "schedule.updates_per_stage": UPDATES,
        "schedule.prompts_per_update": PROMPTS,
        "objective.name": "grpo",
        "optimizer.lr": LR,
        "optimizer.warmup_updates": WARMUP,
        "eval.every": 0,
        "run.tensorboard": False,
        "run.rehearse": False,
    }
    command = [sys.executable, "-W", "ignore", "-m", "megarl.cli", "train", RECIPE, "--run-dir", str(output)]
    pairs = {name: "{}" if value == {} else json.dumps(value) for name, value in values.items()}
    return [*command, *(part for name, value in pairs.items() for part in ("--set", f"{name}={value}"))]


def train_with_trl(work: Path, of_trainer: Any = None, updates: int = UPDATES, **changed: Any) -> list[dict[str, Any]]:
    """Runs in TRL's environment; returns its log. One batch of a device is one update.

    updates: in a stage, all of which are generated at once. changed: settings of `GRPOConfig`.
    """
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    def is_right(completion_ids: list[list[int]], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    settings: dict[str, Any] = dict(
        output_dir=str(work / "trainer"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * RESPONSES,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_generations=RESPONSES,
        max_steps=STAGES * updates,
        max_completion_length=TOKENS,
        temperature=1.0,
        beta=0.0,
        epsilon=CLIP,
        loss_type="grpo",
        learning_rate=LR,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARMUP,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        model_init_kwargs={"dtype": "float32"},
    )
    prompts, cache = str(work / "prompts.jsonl"), str(work / "datasets")
    dataset = load_dataset("json", data_files=prompts, split="train", cache_dir=cache)
    config = GRPOConfig(**settings | changed)
    trainer = (of_trainer or GRPOTrainer)(str(BASE), is_right, config, train_dataset=dataset)
    trainer.train()
    trainer.save_model(str(work / "final"))
    return list(trainer.state.log_history)


def report_of_trl(work: Path) -> None:
    """Print what `compare` needs."""
    log = train_with_trl(work)
    rewards = [line["reward"] for line in log if "reward" in line]
    print(json.dumps({"updates": len([line for line in log if "loss" in line]), "rewards": [rewards[0], rewards[-1]]}))


def check_example(work: Path) -> None:
    """Exit with an error unless TRL's loss and that of the example agree, token mean and clip as GRPO has them."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "examples/library"), str(Path(__file__).parents[1])]
    from trl_trainer import MegarlTrainer

    from megarl.objectives import build_objective

    MegarlTrainer.objective = build_objective("grpo", {"eps_low": CLIP, "eps_high": CLIP, "aggregation": "token_mean"})
    logs = [
        train_with_trl(work, trainer, 4, loss_type="dapo", router_aux_loss_coef=0.0, logging_steps=1)
        for trainer in (None, MegarlTrainer)
    ]
    pairs = [[(line["loss"], line["grad_norm"]) for line in log if "loss" in line] for log in logs]
    for (loss, norm), (ours, our_norm) in zip(*pairs, strict=True):
        print(f"loss {loss:.6f} {ours:.6f}, gradient's norm {norm:.6f} {our_norm:.6f}")
        if abs(loss - ours) > 1e-4 * max(1.0, abs(loss)) or abs(norm - our_norm) > 1e-3 * norm:
            sys.exit("examples/library/trl_trainer.py has another loss than TRL")


def trl_command(trl: str, work: Path, *options: str) -> list[str]:
    return [trl, "-W", "ignore", __file__, "--of-trl", str(work), *options]


def seconds_of(command: list[str], threads: int) -> tuple[float, str]:
    """(wall seconds, what the command printed)."""
    start = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return time.perf_counter() - start, result.stdout


def compare(trl: str, repeats: int, threads: int) -> list[dict[str, Any]]:
    """Rows of both sides in turn, so that other load on the machine affects both."""
    rows = []
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory(prefix="megarl-trl-") as folder:
            work = Path(folder)
            write_prompts(work / "prompts.jsonl")
            seconds, _ = seconds_of(megarl_command(work / "prompts.jsonl", work / "run"), threads)
            updates = [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]
            rewards = [mean_reward(updates[:UPDATES]), mean_reward(updates[-UPDATES:])]
            rows.append(row("megarl", repeat, threads, seconds, len(updates), rewards))
            seconds, output = seconds_of(trl_command(trl, work), threads)
            told = json.loads(output.splitlines()[-1])
            rows.append(row("trl", repeat, threads, seconds, told["updates"], told["rewards"]))
            rows[-1]["times megarl's"] = rows[-1]["seconds"] / rows[-2]["seconds"]
    return rows


def mean_reward(updates: list[dict[str, Any]]) -> float:
    return sum(update["reward/mean"] for update in updates) / len(updates)


def row(side: str, repeat: int, threads: int, seconds: float, updates: int, rewards: list[float]) -> dict[str, Any]:
    first, last = rewards
    return {
        "side": side,
        "repeat": repeat,
        "threads": threads,
        "seconds": seconds,
        "updates": updates,
        "reward of the first rollout": first,
        "of the last": last,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", help="the Python of the environment that has TRL")
    parser.add_argument("--check", action="store_true", help="compare the example's losses instead")
    parser.add_argument("--of-trl", type=Path, help=argparse.SUPPRESS)  # the side of TRL, in this directory
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.of_trl:
        (check_example if options.check else report_of_trl)(options.of_trl)
        return
    if options.check:
        with tempfile.TemporaryDirectory(prefix="megarl-trl-") as folder:
            write_prompts(Path(folder) / "prompts.jsonl")
            _, printed = seconds_of(trl_command(options.trl, Path(folder), "--check"), options.threads)
            print(printed)
        return
    from common import write_table

    write_table("against_trl", compare(options.trl, options.repeats, options.threads))


if __name__ == "__main__":
    main()
