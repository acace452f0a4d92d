"""The cost of verification for generation: verifiers in a pool of workers, in the same process, or not at all.

The verifiers: math-verify, which gets every response as a worked solution of a few hundred letters; and the scorer of
reasoning-gym's countdown, which gets its own answers. All ways use one engine with the same
prompts and seeds: a small dense model on one CPU thread. They take turns, and the median over the turns counts.
CPU-seconds are those of the generating process; the workers run on other cores, or in the time that it leaves. "asking"
is the share of these CPU-seconds spent in requesting rewards and collecting them; other load disturbs it least.

    python benchmarks/verification.py [--groups 8] [--tokens 64] [--turns 8] [--limit 0.02]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import ROOT, write_table
from vllm_throughput import SAMPLES, make_model

from megarl.data.prompts import Prompt
from megarl.data.sources import GymItems
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.scoring import Scoring, text_of
from megarl.recipe.load import load_recipe
from megarl.recipe.tables import RewardTable
from megarl.rewards import Score
from megarl.rewards.math import Math
from megarl.rewards.pool import Limits, VerifierPool
from megarl.rewards.reasoning_gym import ReasoningGym
from megarl.storage.policies import copy_policy

SOLUTION = (
    "We write $x^2 - {n}x + {m} = 0$ and complete the square: $(x - \\frac{{{n}}}{{2}})^2 = \\frac{{{n}^2 - 4 \\cdot "
    "{m}}}{{4}}$. Both roots are real, their sum is ${n}$ and their product ${m}$, so that $\\frac{{1}}{{x_1}} + "
    "\\frac{{1}}{{x_2}} = \\frac{{{n}}}{{{m}}}$. The answer is \\boxed{{\\frac{{{n}}}{{{m}}}}}."
)


class Solutions:
    """A tokenizer that decodes every response to a different solution."""

    def decode(self, tokens: Any, **options: Any) -> str:
        return SOLUTION.format(n=int(tokens[0]) + 2, m=int(tokens[-1]) + 3)


class TimedPool:
    """A pool that sums the CPU-seconds of calls to it. instead: the prompt whose answer it scores for any response."""

    def __init__(self, pool: VerifierPool, instead: Prompt | None = None) -> None:
        self._pool, self._instead, self.seconds = pool, instead, 0.0
        self._last: Prompt | None = None

    def ask(self, prompt: Prompt, response: str) -> range:
        if self._instead is not None:
            if prompt is not self._last:
                self._last, self._instead = prompt, replace(self._instead)  # the pool pickles each prompt once
            prompt, response = self._instead, self._instead.answer
        start = time.thread_time()
        numbers = self._pool.ask(prompt, response)
        self.seconds += time.thread_time() - start
        return numbers

    def verdicts(self, wait: bool, unless: Callable[[], bool]) -> list[tuple[int, Score]]:
        start = time.thread_time()
        found = self._pool.verdicts(wait, unless)
        self.seconds += time.thread_time() - start
        return found

    def close(self) -> None:
        self._pool.close()


class InProcess:
    """As `VerifierPool`, but scores in the calling process; every score is 0 without a verifier."""

    def __init__(self, verifier: Math | None) -> None:
        self._verifier, self._verdicts, self._asked = verifier, [], 0

    def ask(self, prompt: Prompt, response: str) -> range:
        self._asked += 1
        score = self._verifier.score(prompt, response) if self._verifier else 0.0
        self._verdicts.append((self._asked, Score(score)))
        return range(self._asked, self._asked + 1)

    def verdicts(self, wait: bool, unless: Callable[[], bool]) -> list[tuple[int, Score]]:
        found, self._verdicts = self._verdicts, []
        return found

    def close(self) -> None: ...


def take_turns(worker: RolloutWorker, ways: dict[str, Any], size: int, turns: int) -> list[dict[str, Any]]:
    rows = []
    for turn in range(-1, turns):  # the first one warms up
        groups = range((turn + 1) * size, (turn + 2) * size)
        names = list(ways) if turn % 2 else list(ways)[::-1]
        row: dict[str, Any] = {"turn": turn, "responses": size * SAMPLES}
        for name in names:
            longest = worker.recipe.rollout.max_response_tokens
            worker.scoring = Scoring(ways[name], worker.recipe.reward, text_of(worker.tokenizer), True, longest)
            asking, cpu, wall = getattr(ways[name], "seconds", 0.0), time.process_time(), time.perf_counter()
            chunks = [groups, None]
            portions = worker.generate(lambda left=chunks: left.pop(0), worker.prompts.train, worker.sampling())
            stored = [group for portion in portions for group in portion]
            row |= {f"{name}, CPU s": time.process_time() - cpu, f"{name}, s": time.perf_counter() - wall}
            assert len(stored) == size
            if isinstance(ways[name], TimedPool):
                row[f"asking, {name}"] = (ways[name].seconds - asking) / row[f"{name}, CPU s"]
        rows += [row] if turn >= 0 else []
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8, help=f"prompts per turn, with {SAMPLES} responses each")
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--limit", type=float, help="exit with 1 if the share of the pool's calls is above this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, policy = make_model(Path(folder) / "model"), Path(folder) / "policy"
        settings = [f"rollout.max_response_tokens={options.tokens}", f'model.path="{model}"']
        settings += ["reward.kind=math", "reward.require_stop=false", "eval.every=0"]
        recipe = load_recipe(ROOT / "examples/quickstart/recipe.toml", settings)
        limits = Limits.of_this_process(recipe)
        pool = TimedPool(VerifierPool(lambda: Math(recipe.reward), limits))
        countdown = GymItems("countdown", {})
        item = countdown.train(0, 0, 0)
        question = Prompt(0, item["question"], (), item["answer"], item)
        scorers = {"countdown": countdown.scorer}
        scored = TimedPool(VerifierPool(lambda: ReasoningGym(scorers), limits), question)
        copy_policy(model, model, policy)
        worker = RolloutWorker(recipe, 0, policy)
    worker.tokenizer, worker.stop_token_ids = Solutions(), ()
    same = InProcess(Math(RewardTable(kind="math")))
    ways = {"unverified": InProcess(None), "math": pool, "countdown": scored, "math, same process": same}
    rows = take_turns(worker, ways, options.groups, options.turns)
    worker.close()
    pool.close()
    scored.close()
    for row in rows:
        row |= {f"{name} / unverified": row[f"{name}, CPU s"] / row["unverified, CPU s"] for name in list(ways)[1:]}
    write_table("verification", rows)
    ratios = {name: statistics.median(row[f"{name} / unverified"] for row in rows) for name in list(ways)[1:]}
    print(", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()), "times the CPU time without verification")
    for name in ("math", "countdown"):
        asking = statistics.median(row[f"asking, {name}"] for row in rows)
        print(f"{name}: requesting and collecting rewards takes {asking:.2%} of the CPU time of generation (median)")
        if options.limit and asking > options.limit:
            raise SystemExit(
                f"{name} costs {asking:.2%} of the CPU time of generation; the limit is {options.limit:.0%}"
            )


if __name__ == "__main__":
    main()
