"""What the weight-drift check notices, in float32 and in simulated bfloat16, and that it gives no false alarm.

Actor and engine compute the same model with roundings to bfloat16 at different places, as two implementations do; the
policy moves by as much at every weight as a step of Adam does.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.errors import UserError
from megarl.rollout.drift import judge
from megarl.storage.reference_logprobs import Reference
from tests.rollout.tiny_models import save

SEQUENCES, TOKENS, PROMPT, TRIALS, STEP = 32, 64, 8, 200, 1e-3
ROUNDED = {"actor": ("Linear", "RMSNorm"), "engine": ("DecoderLayer", "RMSNorm", "SparseMoeBlock", "Attention")}


class Implementation:
    """One way to compute the model in a precision."""

    def __init__(self, path, precision, who):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.low = precision == "bfloat16"
        if self.low:
            for module in self.model.modules():
                if type(module).__name__.endswith(ROUNDED[who]) and module is not self.model.lm_head:
                    module.register_forward_hook(rounded)

    @torch.inference_mode()
    def score(self, weights, text):
        self.model.load_state_dict({k: w.bfloat16().float() if self.low else w for k, w in weights.items()})
        logprobs = self.model(text, use_cache=False).logits[:, :-1].log_softmax(-1)
        return list(logprobs.gather(2, text[:, 1:, None])[..., 0].numpy())


def rounded(module, inputs, output):
    if isinstance(output, tuple):
        return (output[0].bfloat16().float(), *output[1:])
    return output.bfloat16().float()


class Case:
    """A policy, text that both have scored, and the policies after one more update."""

    def __init__(self, path, precision):
        self.precision = precision
        self.actor, self.engine = (Implementation(path, precision, who) for who in ("actor", "engine"))
        self.before = {name: weight.clone() for name, weight in self.actor.model.state_dict().items()}
        self.text = torch.randint(39, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
        self.previous = self.actor.score(self.before, self.text)
        self.stored = [scores[PROMPT - 1 :] for scores in self.engine.score(self.before, self.text)]

    def update(self, seed):
        """New weights, and the reference that their exporter writes."""
        generator = torch.Generator().manual_seed(seed)
        after = {
            name: weight + STEP * torch.randn(weight.shape, generator=generator).sign()
            for name, weight in self.before.items()
        }
        new = self.actor.score(after, self.text)
        return after, Reference(self.text.tolist(), new, self.precision, self.previous, self.stored)

    def judge(self, weights, reference):
        return judge(self.engine.score(weights, self.text), reference, self.precision)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request, tmp_path_factory):
    path = save(tmp_path_factory.mktemp("model"), spread=0.05, num_hidden_layers=3)
    return Case(path, request.param)


def permuted_expert(before, after):
    """Two experts of one layer have changed places; the router sends to the wrong one."""
    names = [name for name in after if "layers.1.mlp.experts" in name]
    assert names
    order = [1, 0, *range(2, 8)]
    return after | {name: after[name][order] for name in names}


def stale_layer(before, after):
    return after | {name: weight for name, weight in before.items() if ".layers.1." in name}


def one_update_earlier(before, after):
    return before


@pytest.mark.parametrize("wrong", [one_update_earlier, permuted_expert, stale_layer])
def test_wrong_weights_are_noticed(case, wrong):
    for seed in range(5):
        after, reference = case.update(seed)
        with pytest.raises(UserError, match="weights are not the policy's"):
            case.judge(wrong(case.before, after), reference)


def test_what_a_tolerance_cannot_see_is_told_by_the_policy_before(case):
    _, reference = case.update(0)
    with pytest.raises(UserError) as error:
        case.judge(case.before, replace(reference, stored=None))
    assert ("those of the previous policy" in str(error.value)) is (case.precision == "bfloat16")


def test_right_weights_raise_no_alarm(case):
    """Nor do they of a policy that has not moved at all."""
    unmoved = Reference(case.text.tolist(), case.previous, case.precision, case.previous, case.stored)
    assert case.judge(case.before, unmoved).nearer is None
    nearest = []
    for seed in range(TRIALS):
        after, reference = case.update(seed)
        nearest.append(case.judge(after, reference).nearer)
    assert np.min(nearest) > 4
