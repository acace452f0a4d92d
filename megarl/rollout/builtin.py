"""The built-in engine: a decode loop with a KV cache on the exported Hugging Face model, in one process.

All rows of a batch are at the same absolute position: a prompt joins when the loop has reached its length, and its
responses leave when they are finished. So neither padding nor an attention mask is needed.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.errors import UserError
from megarl.heartbeats import beat
from megarl.recipe.tables import Recipe
from megarl.rollout.drift import score
from megarl.rollout.engine import Completion, Request, RolloutEngine, awake_seconds, section

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

RECORDS_EXPERTS: frozenset[str] = frozenset()
NEW_INTERPRETER = False


def check(recipe: Recipe, stage: int, hf: dict[str, Any]) -> None:
    """Raise `UserError` if the recipe asks for several GPUs a replica."""
    table = recipe.rollout_of(stage)
    if table.tensor_parallel > 1:
        raise UserError(
            f"{section(recipe, stage)} tensor_parallel = {table.tensor_parallel}: "
            "the built-in engine runs each replica on one device; set it to 1"
        )


def build(recipe: Recipe, stage: int, policy_dir: Path, version: int, routed_experts: bool) -> RolloutEngine:
    """See `EngineModule`; this engine records no experts, so ``routed_experts`` must be False."""
    assert not routed_experts, "`check_engine` refuses this"
    return BuiltinEngine(
        policy_dir, version, "cpu" if recipe.actor.backend == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"
    )


class BuiltinEngine(RolloutEngine):
    """A `RolloutEngine` on transformers. On one machine the same request always gives the same bytes.

    ``policy_dir`` is a local directory with config.json and safetensors; `UserError` if it is incomplete.
    """

    repeats_chunks = True

    def __init__(self, policy_dir: Path, version: int, device: str = "cpu") -> None:
        self.device, self.precision = torch.device(device), "float32"
        self._model: PreTrainedModel | None = None
        self._decoder: _Decoder | None = None  # the request that is being served
        self._number = 0  # its number
        self.load_weights(policy_dir, version)

    @torch.inference_mode()
    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        assert self._model is not None
        return score(self._model, sequences)

    def load_weights(self, policy_dir: Path, version: int) -> None:
        self._model = None  # free the old weights first, so that memory never holds two copies
        self.policy_dir, self.version = Path(policy_dir), version
        self._model = _load(self.policy_dir)
        self._model.to(self.device)  # type: ignore[arg-type]

    def sleep(self) -> None:
        self._model = None

    @property
    def decoding(self) -> int:
        return self._decoder.unfinished if self._decoder else 0

    @property
    def decoding_tokens(self) -> int:
        return self._decoder.sampled if self._decoder else 0

    def has_room(self) -> bool:
        """One request is served after another, because responses that decode together change each other's last bits."""
        return not self.decoding

    def submit(self, number: int, request: Request) -> None:
        assert self._model is not None
        self._number, self._decoder = number, _Decoder(self._model, request, self.version)

    def step(self) -> list[tuple[int, Completion]]:
        assert self._decoder is not None
        beat("decoding")
        ended = [(self._number, completion) for completion in self._decoder.step()]
        if not self.decoding:
            self._decoder = None  # with its cache
        return ended

    def interrupt(self) -> list[tuple[int, Completion]]:
        decoder, self._decoder = self._decoder, None
        return [(self._number, completion) for completion in decoder.interrupted()] if decoder else []

    def abort(self) -> None:
        self._decoder = None


def _nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Nucleus sampling: [n, V] log-probs renormalised over the smallest set of top tokens with a mass >= ``top_p``.

    Holtzman et al. 2020 (arXiv 1904.09751), Equations 2 and 3. Ties are broken by the lower token id.
    """
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.double().exp_()
    kept = probabilities.cumsum(-1) - probabilities < top_p  # the more probable tokens have a mass below top_p
    kept[:, 0] = True
    cut = torch.full_like(logprobs, -torch.inf)
    return cut.scatter(-1, order, ordered.masked_fill(~kept, -torch.inf)).log_softmax(-1)


class _Decoder:
    """A request being served.

    The n rows being decoded are all at the same ``position``. They share a KV cache and have the logits of their next
    tokens.
    """

    def __init__(self, model: PreTrainedModel, request: Request, version: int) -> None:
        self.model, self.sampling, self.version = model, request.sampling, version
        # transformers 5.24 renamed it; a name that a model does not know may be ignored, and the cache with it
        names = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in names else "past_key_values"
        # the token sequences to prefill, and how many rows start from each; with prefixes each response has its own
        self.starts, self.fanout = request.prompts, self.sampling.samples
        if prefixes := self.sampling.prefixes:
            self.starts = [[*self.starts[row // self.fanout], *prefix] for row, prefix in enumerate(prefixes)]
            self.fanout = 1
        self.waiting = sorted(range(len(self.starts)), key=lambda i: len(self.starts[i]), reverse=True)  # not begun
        self.stop_token_ids = np.array(self.sampling.stop_token_ids, np.int64)
        self.limits = np.array(self.sampling.limits)
        # of all responses of the request, each with the number prompt * samples + sample
        self.uniforms = np.stack([_uniforms(seed, self.sampling.max_tokens) for seed in self.sampling.seeds])
        self.lengths = np.array([len(prompt) for prompt in request.prompts]).repeat(self.sampling.samples)
        self.begun = np.array([len(prefix) for prefix in self.sampling.prefixes] or [0] * len(self.lengths))
        self.deadlines = np.full(len(self.lengths), np.inf)
        self.tokens = np.empty((len(self.lengths), self.sampling.max_tokens), np.int32)
        self.logprobs = np.empty((len(self.lengths), self.sampling.max_tokens), np.float32)
        # of the rows
        self.rows = np.empty(0, np.int64)  # [n] the number of the response
        self.position = 0
        self.cache = _empty_cache(model)
        self.logits = torch.empty(0, model.config.vocab_size, device=model.device)  # [n, V] float32

    @property
    def unfinished(self) -> int:
        """The number of responses that have not ended."""
        return len(self.rows) + len(self.waiting) * self.fanout

    @property
    def sampled(self) -> int:
        """Tokens of the responses that have begun and not ended, without prefixes."""
        return int((self.position - self.lengths[self.rows] - self.begun[self.rows]).sum())

    def step(self) -> list[Completion]:
        """Let prompts of the current length join, sample a token for each row, and return the rows that end with it."""
        if not len(self.rows):
            self.position = len(self.starts[self.waiting[-1]])
        while self.waiting and len(self.starts[self.waiting[-1]]) == self.position:
            joining = [i for i in self.waiting if len(self.starts[i]) == self.position]
            del self.waiting[-len(joining) :]
            self.join(joining, [self.starts[i] for i in joining])
        now, rows = awake_seconds(), self.rows
        self.deadlines[rows] = np.minimum(self.deadlines[rows], now + self.sampling.timeout)
        steps = self.position - self.lengths[rows]  # tokens each row has sampled so far
        sampled, logprobs, stopped = self.sample(self.uniforms[rows, steps])
        self.tokens[rows, steps], self.logprobs[rows, steps] = sampled, logprobs
        full = steps + 1 == self.limits[rows]
        finished = stopped | full | (now > self.deadlines[rows])
        ended = []
        for i in np.flatnonzero(finished):
            reason = "stop" if stopped[i] else "length" if full[i] else "timeout"
            ended.append(self._completion(int(rows[i]), int(steps[i]) + 1, reason))
        self.advance(sampled, finished)
        return ended

    def interrupted(self) -> list[Completion]:
        """All unfinished responses as far as they got."""
        begun = [(row, self.position - int(self.lengths[row])) for row in self.rows.tolist()]
        others = [index * self.fanout + k for index in self.waiting for k in range(self.fanout)]
        ends = begun + [(row, int(self.begun[row])) for row in others]
        return [self._completion(row, end, "interrupted") for row, end in ends]

    def _completion(self, row: int, length: int, finish_reason: str) -> Completion:
        return Completion(
            prompt=row // self.sampling.samples,
            sample=row % self.sampling.samples,
            tokens=self.tokens[row, self.begun[row] : length].copy(),
            logprobs=self.logprobs[row, self.begun[row] : length].copy(),
            finish_reason=finish_reason,
            routed_experts=None,
            policy_version=self.version,
        )

    @torch.inference_mode()
    def join(self, indices: list[int], starts: list[list[int]]) -> None:
        """Prefill each of ``starts``, all ``position`` tokens long, and add ``fanout`` rows that continue it.

        indices: the index of each start in the request; its rows get the numbers ``index * fanout + k``.
        """
        cache = _empty_cache(self.model)
        logits = self._forward(torch.tensor(starts), cache).repeat_interleave(self.fanout, 0)
        # the only method that takes rows of transformers' recurrent layers, too; one may occur several times
        cache.reorder_cache(torch.arange(len(starts)).repeat_interleave(self.fanout))
        if len(self.rows):
            for new_layer, layer in zip(cache.layers, self.cache.layers, strict=True):
                _prepend(new_layer, layer)
        self.cache, self.logits = cache, torch.cat([self.logits, logits])
        new = np.array(indices)[:, None] * self.fanout + np.arange(self.fanout)
        self.rows = np.concatenate([self.rows, new.ravel()])

    @torch.inference_mode()
    def sample(self, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Next tokens [n] by the inverse CDF at ``uniforms`` [n] float64, their log-probs [n], which are stops [n]."""
        logprobs = (self.logits / (self.sampling.temperature or 1.0)).log_softmax(-1)
        if self.sampling.temperature == 0:
            tokens = logprobs.argmax(-1, keepdim=True)
        else:
            if self.sampling.top_p < 1:
                logprobs = _nucleus(logprobs, self.sampling.top_p)
            cdf = logprobs.double().exp_().cumsum(-1)
            # u <= 1 - 2**-53, so u * total rounds to less than the total: no token of probability 0 can be drawn.
            target = torch.from_numpy(uniforms)[:, None].to(cdf.device) * cdf[:, -1:]
            # beyond the end only where logits are NaN, which the caller then sees in the log-prob
            tokens = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
        sampled = tokens[:, 0].cpu().numpy()
        return sampled, logprobs.gather(1, tokens)[:, 0].cpu().numpy(), np.isin(sampled, self.stop_token_ids)

    @torch.inference_mode()
    def advance(self, sampled: np.ndarray, finished: np.ndarray) -> None:
        """Drop the rows marked in ``finished`` [n] and feed each other row its token of ``sampled`` [n]."""
        if finished.any():
            keep = np.flatnonzero(~finished)
            self.rows, sampled = self.rows[keep], sampled[keep]
            if len(keep):
                self.cache.reorder_cache(torch.from_numpy(keep))
        self.position += 1
        self.logits = self._forward(torch.from_numpy(sampled)[:, None], self.cache) if len(sampled) else self.logits[:0]

    def _forward(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Logits [n, V] float32 of the token after ``tokens`` [n, t], which are appended to ``cache``."""
        kept = {self.cache_argument: cache, "use_cache": True}
        output = self.model(input_ids=tokens.to(self.model.device), logits_to_keep=1, **kept)
        return output.logits[:, -1].float()


def _prepend(layer: Any, before: Any) -> None:
    """Insert the rows of ``before``, the same layer of another cache, before those of ``layer``."""
    if hasattr(layer, "keys"):
        layer.keys, layer.values = torch.cat([before.keys, layer.keys]), torch.cat([before.values, layer.values])
        return
    for states in ("conv_states", "recurrent_states"):
        getattr(layer, states)[0] = torch.cat([getattr(before, states)[0], getattr(layer, states)[0]])


def _uniforms(seed: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1): number t depends only on the seed and t."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def _empty_cache(model: PreTrainedModel) -> Any:
    from transformers import DynamicCache  # imported late, here and below: it takes seconds that `check` can do without

    return DynamicCache(config=model.config)


def _load(policy_dir: Path) -> PreTrainedModel:
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            policy_dir,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # so that they are listed in the report below
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise UserError(f"cannot load the policy in {policy_dir}: {error}") from error
    model, report = loaded
    # transformers only warns about these, and initialises missing weights at random
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if report[problem]:
            names = ", ".join(sorted(map(str, report[problem]))[:4])
            raise UserError(f"the weights in {policy_dir} do not fit its config.json: {problem} {names}")
    served = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)  # the kinds that `_prepend` supports
    if not all(type(layer) in served for layer in _empty_cache(model).layers):
        raise UserError(
            f"{policy_dir} has layers whose cache is neither keys and values nor a recurrent state: the built-in "
            "engine cannot serve them, use another [rollout] engine"
        )
    return model.eval()
