"""The weight-drift check: the policy's weights pass, changed weights and NaN do not."""

import hashlib
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.errors import UserError
from megarl.phases.rollout_worker import RolloutWorker
from megarl.rollout.builtin import BuiltinEngine
from megarl.rollout.drift import hugging_face_reference, judge, measure_drift
from megarl.rollout.engine import EngineFault
from megarl.storage.policies import PolicyInfo, Reference, cut_text, read_reference, write_info, write_reference
from tests.rollout.engines import reference_of
from tests.rollout.tiny_models import changed, save


@pytest.fixture(scope="module")
def reference(moe_dir):
    return reference_of(moe_dir)


def moved(reference, by, sequences):
    """The reference's log-probs, of which the last three of the first ``sequences`` are off by ``by`` nats."""
    scores = [own.copy() for own in reference.logprobs]
    for own in scores[:sequences]:
        own[-3:] += by
    return scores


def test_in_float32_one_sequence_may_depend_on_a_tie_between_experts(reference):
    mixed, wrong = replace(reference, experts=True), "weights are not the policy's"
    assert judge(moved(mixed, 0.0, 0), mixed, "float32").tokens == 188
    drift = judge(moved(mixed, 0.05, 1), mixed, "float32")
    assert drift.max == 0 and drift.tokens == 141
    assert judge(moved(mixed, 0.05, 1), mixed, "bfloat16").tokens == 188
    far = "of 188 tokens are .* with the sequence that differs most"
    cases = [(0.05, 2, mixed, wrong), (0.05, 1, reference, wrong), (np.nan, 1, mixed, far), (20.0, 1, mixed, far)]
    for by, sequences, found, message in cases:
        with pytest.raises(EngineFault, match=message):
            judge(moved(found, by, sequences), found, "float32")


def test_the_tolerance_is_that_of_the_coarser_precision_and_nan_fails(moe_dir, reference):
    engine = BuiltinEngine(moe_dir, 0)
    off = [scores + np.float32(2e-4) for scores in reference.logprobs]
    with pytest.raises(EngineFault, match=r"0.0002 nats off in the mean .* limits for float32 are 0.0001"):
        measure_drift(engine, replace(reference, logprobs=off))
    assert measure_drift(engine, replace(reference, logprobs=off, precision="bfloat16")).precision == "bfloat16"
    for by, tolerable in ((5e-4, True), (2e-3, False)):  # at one token, where other roundings may add up
        one = [scores.copy() for scores in reference.logprobs]
        one[0][5] += by
        with nullcontext() if tolerable else pytest.raises(EngineFault, match="0.002 at a token"):
            judge(one, reference, "float32")
    undefined = [np.full_like(scores, np.nan) for scores in reference.logprobs]
    with pytest.raises(EngineFault, match="nan nats"):
        measure_drift(engine, replace(reference, logprobs=undefined, precision="bfloat16"))


def test_a_base_model_with_damaged_weights_is_a_mistake_of_the_user(moe_dir, tmp_path):
    damaged = shutil.copytree(moe_dir, tmp_path / "damaged")
    changed(damaged, lambda weights: weights["lm_head.weight"][7].fill_(np.nan))
    with pytest.raises(UserError, match=f"{damaged} gives log-probs that are not finite"):
        hugging_face_reference(damaged, [[1, 2, 3]])


def content(found):
    arrays = (found.logprobs, found.previous, found.stored)
    return [[own.tobytes() for own in part] for part in arrays], found.sequences, found.precision


def test_a_reference_is_read_as_it_was_written_and_a_damaged_file_is_refused(tmp_path, reference):
    previous = [scores + 1 for scores in reference.logprobs]
    written = replace(reference, previous=previous, stored=[scores[9:] for scores in previous])
    write_reference(tmp_path, written)
    assert content(read_reference(tmp_path)) == content(written) and read_reference(tmp_path / "nothing") is None
    fields = json.loads((tmp_path / "reference.json").read_text())
    damages = ({"previous": [[0.0]]}, {"previous": 7}, {"logprobs": [[0.0]]})
    for damaged in ("{", *(json.dumps(fields | damage) for damage in damages)):
        (tmp_path / "reference.json").write_text(damaged)
        with pytest.raises(UserError, match=r"reference.json is damaged"):
            read_reference(tmp_path)


def test_reference_text_is_cut_to_fit_into_the_engines_context():
    texts = [[7] * 9, [7], [7] * 2000, *[[7] * 3] * 40]
    assert [len(text) for text in cut_text(texts, 4096)] == [9, 512, *[3] * 30]
    assert [len(text) for text in cut_text(texts, 6)] == [5, 5, *[3] * 30]


def test_sampled_log_probs_that_differ_from_the_engines_own_scores_are_noticed(moe_dir, reference):
    """Speculative decoding of vLLM 0.32 returns such log-probs on a CPU."""
    engine = BuiltinEngine(moe_dir, 0)
    step = engine.step
    engine.step = lambda: [(number, replace(one, logprobs=one.logprobs * 0)) for number, one in step()]
    with pytest.raises(EngineFault, match="log-probs that the engine returns for tokens it samples differ from "):
        measure_drift(engine, reference)


class IgnoresLoads(BuiltinEngine):
    """Loading weights in place has no effect on it; it has a checksum of its weights, as SGLang."""

    def load_weights(self, policy_dir, version):
        if self._model is None:
            super().load_weights(policy_dir, version)

    def checksum(self):
        weights = self._model.state_dict().values()
        return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()


def test_stale_weights_are_noticed_by_their_checksum_however_similar_they_are(moe_dir, tmp_path):
    """The policy has changed by less than the comparison of log-probs can show."""
    first, moved = (shutil.copytree(moe_dir, tmp_path / name) for name in ("first", "moved"))
    changed(moved, lambda weights: weights["lm_head.weight"].mul_(1 + 1e-6))
    for number, path in enumerate((first, moved)):
        write_info(path, PolicyInfo(number, f"hash {number}"))
        write_reference(path, reference_of(path))
    worker = object.__new__(RolloutWorker)
    worker.engine, worker.weights_hash = IgnoresLoads(first, 0), "hash 0"
    assert worker.check_drift(first, None).checksum == worker.engine.checksum()
    worker.load(first)
    worker.check_drift(first, None)
    worker.load(moved)
    assert judge(worker.engine.score(reference_of(moved).sequences), reference_of(moved), "float32").max < 1e-4
    with pytest.raises(EngineFault, match="left the engine's previous weights unchanged"):
        worker.check_drift(moved, None)
    still = replace(reference_of(first), previous=reference_of(first).logprobs)  # an update without a gradient
    measure_drift(worker.engine, still, worker.engine.checksum())
    worker.engine._model = None  # so that the next load has an effect
    worker.engine.load_weights(moved, 1)
    assert worker.check_drift(moved, None).checksum == worker.checksum


TOKENS, PROMPT = 512, 400
# nats: the mean distances of an engine in bfloat16, on prompts and on responses, are .05 and .012
NOISE = np.where(np.arange(TOKENS - 1) < PROMPT - 1, 0.05, 0.012) * np.sqrt(np.pi / 2)
UPDATE = 0.01  # by which one update moves a token


def noisy(logprobs, seed, spread=NOISE):
    rng = np.random.default_rng(seed)
    return [(own + spread * rng.normal(size=len(own))).astype(np.float32) for own in logprobs]


def test_prompts_may_be_further_off_than_responses_and_old_weights_may_not():
    """The limit is derived from the engine's distance on responses, a quarter of that on prompts."""
    rng = np.random.default_rng(0)
    sequences = rng.integers(39, size=(32, TOKENS)).tolist()
    first = [rng.normal(-1, 0.5, TOKENS - 1).astype(np.float32) for _ in sequences]
    before = noisy(first, 1, UPDATE * 124**0.5)  # the first policy is far behind
    new = noisy(before, 2, UPDATE * 4**0.5)
    stored = [scores[PROMPT - 1 :] for scores in noisy(first, 3)]
    reference = Reference(sequences, new, "bfloat16", first, stored)
    drift = judge(noisy(new, 4), reference, "bfloat16")
    assert drift.tokens == 32 * (TOKENS - PROMPT) and drift.mean == pytest.approx(0.012, rel=0.05)
    recent = replace(reference, previous=before, stored=[scores[PROMPT - 1 :] for scores in noisy(before, 3)])
    judge(noisy(new, 4), recent, "bfloat16")
    with pytest.raises(EngineFault, match="those of the previous policy"):
        judge(noisy(before, 4), recent, "bfloat16")
    with pytest.raises(EngineFault, match="of 3584 tokens are .* limits for bfloat16 are 0.036"):
        judge(noisy(noisy(first, 6, UPDATE * 32**0.5), 4), reference, "bfloat16")
    nonsense = [np.where(np.arange(TOKENS - 1) < PROMPT - 1, -9, own) for own in noisy(new, 4)]
    with pytest.raises(EngineFault, match="of 16352 tokens are .* with prompts"):
        judge(nonsense, reference, "bfloat16")


@pytest.mark.parametrize(("off", "said"), [(0.04, ""), (0.064, "0.064 nats off"), (0.11, "0.11 nats off")])
def test_a_base_model_that_rounding_moves_draws_a_warning(reference, off, said):
    scores = [own + np.float32(off) for own in reference.logprobs]
    found = judge(scores, replace(reference, precision="bfloat16"), "bfloat16")
    assert said in found.warning and bool(found.warning) is bool(said)
    with pytest.raises(EngineFault, match="weights are not the policy's"):
        judge([own + np.float32(0.31) for own in reference.logprobs], reference, "bfloat16")
    if off > 0.1:  # an actor's policy is held to its own limit
        with pytest.raises(EngineFault, match="limits for bfloat16 are 0.1"):
            judge(scores, replace(reference, base=False), "bfloat16")


def test_the_head_of_a_bfloat16_model_is_computed_in_float32(tmp_path):
    """By all cores. Logits of 30 would be rounded by .06."""
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path / "float32"), dtype=torch.bfloat16)
    model.lm_head.weight.data *= 8
    model.save_pretrained(path := tmp_path / "bfloat16")
    tokens, hidden = torch.randint(39, (1, 48), generator=torch.Generator().manual_seed(0)), []
    model.lm_head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    with torch.inference_mode():
        low = model(tokens).logits[0, :-1].float().log_softmax(-1)
    high = (hidden[0][0, :-1].float() @ model.lm_head.weight.float().T).log_softmax(-1)
    expected, rounded = (x.gather(1, tokens[0, 1:, None])[:, 0].detach().numpy() for x in (high, low))
    found = hugging_face_reference(path, tokens.tolist())
    assert found.precision == "bfloat16" and found.base
    np.testing.assert_allclose(found.logprobs[0], expected, rtol=0, atol=1e-4)
    assert np.abs(rounded - expected).mean() > 0.01
