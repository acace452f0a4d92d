"""The cost of megarl compared with a plain PyTorch loop: generation and optimisation of the quickstart in CPU-seconds.

The recipe is that with mu-GRPO, examples/quickstart/mu_grpo.toml.

Both sides use the same model, prompts, responses and number of updates, in one process and thread, and take turns of a
few updates, so that other load on the machine affects both. Not counted on either side: process start, imports, loading
the model. Counted for megarl: rollout store, verification, packing, Megatron's schedule, DDP and optimizer, metrics,
checkpoints.

    python benchmarks/quickstart_cost.py [--stages 1] [--updates 96] [--output benchmarks/results/quickstart_cost.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megarl.actor import parallel
from megarl.distributed import become_single_process
from megarl.objectives import build_objective
from megarl.phases.generation import missing_chunks
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.samples import to_samples
from megarl.recipe.load import load_recipe
from megarl.recipe.tables import Recipe
from megarl.rewards import is_scored
from megarl.rewards.parts import build_verifier
from megarl.storage.metrics import NOTHING, MetricsWriter
from megarl.storage.metrics.summary import summary
from megarl.storage.policies import copy_policy
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import RunDir

ROOT = Path(__file__).parents[1]
TURN = 12  # updates of one side before the other side has its turn


class PlainLoop:
    """The same algorithm in plain PyTorch and transformers: padded batches, AdamW, nothing stored on disk."""

    def __init__(self, recipe: Recipe, worker: RolloutWorker) -> None:
        self.recipe, self.worker = recipe, worker
        self.verifier = build_verifier(recipe, worker.prompts)
        self.model = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float32)
        table = recipe.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), table.lr, betas=table.betas, weight_decay=table.weight_decay
        )
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def generate(self, groups: range) -> float:
        """Sample all responses of some groups, left-padded, with a KV cache; returns the mean reward."""
        recipe = self.recipe
        samples, limit = recipe.rollout.responses_per_prompt, recipe.rollout.max_response_tokens
        stop = self.worker.stop_token_ids[0]
        prompts = [self.worker.prompts.train(group) for group in groups]
        width = max(len(p.tokens) for p in prompts)
        ids = torch.tensor([[0] * (width - len(p.tokens)) + list(p.tokens) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p.tokens)) + [1] * len(p.tokens) for p in prompts])
        ids, mask = ids.repeat_interleave(samples, 0), mask.repeat_interleave(samples, 0)
        tokens = torch.zeros(len(ids), limit, dtype=torch.long)
        logprobs = torch.zeros(len(ids), limit)
        alive = torch.ones(len(ids), dtype=torch.bool)
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1)
        for step in range(limit):
            log_p = F.log_softmax(output.logits[:, -1].float(), -1)
            chosen = torch.multinomial(log_p.exp(), 1, generator=self.generator)
            tokens[:, step] = torch.where(alive, chosen[:, 0], 0)
            logprobs[:, step] = log_p.gather(1, chosen)[:, 0] * alive
            alive &= chosen[:, 0] != stop
            if not alive.any() or step == limit - 1:
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            output = self.model(
                input_ids=chosen, attention_mask=mask, past_key_values=output.past_key_values, use_cache=True
            )
        texts = self.worker.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        finish = ["stop" if stopped else "length" for stopped in (tokens == stop).any(1).tolist()]
        rewards = [
            float(self.verifier.score(prompts[i // samples], text) >= recipe.reward.correct_above)
            if is_scored(finish[i], recipe.reward)
            else 0.0
            for i, text in enumerate(texts)
        ]
        return sum(rewards) / len(rewards)

    def update(self, groups: list[Group]) -> tuple[float, float]:
        """One mu-GRPO update on padded batches of stored responses; returns loss and entropy."""
        rewards = torch.tensor([[r.reward for r in group.responses] for group in groups])
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        rows = [(group.prompt_tokens, r) for group in groups for r in group.responses]
        width, limit = max(len(p) for p, _ in rows), max(len(r.tokens) for _, r in rows)
        ids = torch.zeros(len(rows), width + limit, dtype=torch.long)
        attend, mask = torch.zeros_like(ids), torch.zeros(len(rows), limit)
        behaviour = torch.zeros(len(rows), limit)
        for i, (prompt, r) in enumerate(rows):
            ids[i, width - len(prompt) : width] = torch.from_numpy(prompt.astype("int64"))
            ids[i, width : width + len(r.tokens)] = torch.from_numpy(r.tokens.astype("int64"))
            attend[i, width - len(prompt) : width + len(r.tokens)] = 1
            mask[i, : len(r.tokens)] = 1
            behaviour[i, : len(r.tokens)] = torch.from_numpy(r.rollout_logprobs)
        output = self.model(input_ids=ids[:, :-1], attention_mask=attend[:, :-1], use_cache=False, logits_to_keep=limit)
        log_p = F.log_softmax(output.logits.float(), -1)
        chosen = log_p.gather(2, ids[:, width:, None])[..., 0]
        ratio = ((chosen - behaviour) * mask).exp()
        advantage = advantages[:, None].expand_as(ratio)
        objective = self.recipe.objective.fields
        trigger = (advantage < 0) & (ratio < objective.get("veto_threshold", 1e-4)) & mask.bool()
        keep = mask * ~trigger.any(1, keepdim=True)
        loss = -(torch.minimum(ratio * advantage, ratio.clamp(0, 5) * advantage) * keep).sum() / mask.sum()
        entropy = -((log_p.detach().exp() * log_p.detach()).sum(-1) * mask).sum() / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.optimizer.clip_grad)
        self.optimizer.step()
        return loss.item(), entropy.item()


def measure(recipe: Recipe, run: RunDir) -> dict[str, float]:
    """CPU-seconds of both sides over the stages of ``recipe``; each stage generates with the base model."""
    from megarl.actor import checkpoint, packing, step

    seconds = dict.fromkeys(("plain/generate", "plain/optimize", "megarl/generate", "megarl/optimize"), 0.0)

    def timed(name, function, *arguments):
        start = time.process_time()
        result = function(*arguments)
        seconds[name] += time.process_time() - start
        return result

    worker = RolloutWorker(recipe, 0, run.stage(0).policy)
    plain = PlainLoop(recipe, worker)
    objective = build_objective(recipe.objective.name, recipe.objective.fields)
    actor = step.Actor.build(recipe, run.stage(0).policy, torch.device("cpu"))
    metrics = MetricsWriter(run.metrics, NOTHING, b"", 0, recipe.run)

    def generate(chunk):
        chunks = [chunk, None]
        return worker.generate(lambda: chunks.pop(0), worker.prompts.train, worker.sampling())

    def update(store, stage, staleness):
        groups = store.read(run.stage(stage).groups_of_update(store.chosen, staleness))
        samples = to_samples(groups, recipe.objective)
        batches = packing.micro_batches(
            samples, recipe.actor.tokens_per_micro_batch, actor.device, share=actor.models[0].shares_prompts
        )
        values = step.train_step(actor, batches, objective, actor.learning_rate(staleness + 1))
        metrics.append({"update": staleness + 1, **summary(groups), **values})
        if (staleness + 1) % recipe.actor.checkpoint_every == 0:
            metrics.sync()
            checkpoint.save(actor, run.stage(stage).checkpoints, staleness + 1, recipe.actor.keep_checkpoints)

    for stage in range(recipe.schedule.stages):
        here = run.stage(stage)
        here.rollouts.mkdir(parents=True)
        with RolloutWriter(here.rollouts, weights_hash=worker.weights_hash, logprob_mode="processed") as writer:
            for chunk in missing_chunks(here.groups, here.groups, True, recipe.rollout.groups_per_chunk):
                timed("megarl/generate", lambda chunk=chunk: writer.append(*generate(chunk)))
                timed("plain/generate", plain.generate, chunk)
        timed("megarl/generate", seal, here.rollouts, here.groups)
        store = RolloutStore(here.rollouts)
        updates = range(recipe.schedule.updates_per_stage)
        stored = {u: store.read(here.groups_of_update(store.chosen, u)) for u in updates}
        for begin in range(0, len(updates), TURN):
            for staleness in updates[begin : begin + TURN]:
                timed("megarl/optimize", update, store, stage, staleness)
            for staleness in updates[begin : begin + TURN]:
                timed("plain/optimize", plain.update, stored[staleness])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    worker.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # includes the processes that scored the responses
    seconds["megarl/generate"] += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--updates", type=int, default=96, help="updates per stage")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--limit", type=float, help="exit with 1 if the total ratio is above this")
    options = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    overrides = [f"schedule.stages={options.stages}", f"schedule.updates_per_stage={options.updates}"]
    recipe = load_recipe(ROOT / "examples/quickstart/mu_grpo.toml", overrides)
    become_single_process()
    parallel.initialize(recipe)
    with tempfile.TemporaryDirectory() as scratch:
        run = RunDir.create(Path(scratch) / "run", recipe)
        copy_policy(recipe.model.path, recipe.model.tokenizer_path, run.stage(0).policy)
        seconds = measure(recipe, run)
    total = {side: seconds[f"{side}/generate"] + seconds[f"{side}/optimize"] for side in ("plain", "megarl")}
    print(f"{'CPU-seconds':<12}{'generate':>10}{'optimize':>10}{'total':>10}")
    for side in ("plain", "megarl"):
        print(f"{side:<12}{seconds[side + '/generate']:>10.2f}{seconds[side + '/optimize']:>10.2f}{total[side]:>10.2f}")
    ratios = {part: seconds[f"megarl/{part}"] / seconds[f"plain/{part}"] for part in ("generate", "optimize")} | {
        "total": total["megarl"] / total["plain"]
    }
    print(f"{'ratio':<12}{ratios['generate']:>10.2f}{ratios['optimize']:>10.2f}{ratios['total']:>10.2f}")
    if options.output:
        facts = {"torch": torch.__version__, "processor": platform.processor() or platform.machine()}
        facts |= {"stages": options.stages, "updates_per_stage": options.updates}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"cpu_seconds": seconds, "ratio": ratios, **facts}, indent=1) + "\n")
    if options.limit and ratios["total"] > options.limit:
        raise SystemExit(f"megarl costs {ratios['total']:.2f} times the plain loop; the limit is {options.limit}")


if __name__ == "__main__":
    main()
