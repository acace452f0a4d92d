"""Which wrong weights the drift check notices, in float32 and simulated bfloat16.

Actor and engine compute the same model but round to bfloat16 at different places, as two implementations do. An update
moves every weight up or down by the same amount, like the first step of Adam.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.rollout.drift import judge
from megarl.rollout.engine import EngineFault
from megarl.storage.policies import Reference
from tests.extent import EVERY
from tests.rollout.tiny_models import save

SEQUENCES, TOKENS, PROMPT, STEP = 32, 64, 8, 1e-3
TRIALS = 200 if EVERY else 12
ROUNDED = {"actor": ("Linear", "RMSNorm"), "engine": ("DecoderLayer", "RMSNorm", "SparseMoeBlock", "Attention")}


def rounded(module, inputs, output):
    if isinstance(output, tuple):
        return (output[0].bfloat16().float(), *output[1:])
    return output.bfloat16().float()


class Case:
    """A policy, text that actor and engine have scored with it, and policies that are one update later."""

    def __init__(self, path, precision):
        self.precision, self.models = precision, {}
        for who, names in ROUNDED.items():
            model = self.models[who] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for module in model.modules() if precision == "bfloat16" else ():
                if type(module).__name__.endswith(names) and module is not model.lm_head:
                    module.register_forward_hook(rounded)
        self.before = {name: weight.clone() for name, weight in model.state_dict().items()}
        self.text = torch.randint(39, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
        self.previous = self.score("actor", self.before)
        self.stored = [scores[PROMPT - 1 :] for scores in self.score("engine", self.before)]

    @torch.inference_mode()
    def score(self, who, weights):
        low = self.precision == "bfloat16"
        self.models[who].load_state_dict({k: w.bfloat16().float() if low else w for k, w in weights.items()})
        logprobs = self.models[who](self.text, use_cache=False).logits[:, :-1].log_softmax(-1)
        return list(logprobs.gather(2, self.text[:, 1:, None])[..., 0].numpy())

    def update(self, seed):
        """The weights after a random update, and the reference that the actor would export with them."""
        random = torch.Generator().manual_seed(seed)
        steps = {
            name: STEP * torch.randn(weight.shape, generator=random).sign() for name, weight in self.before.items()
        }
        after = {name: weight + steps[name] for name, weight in self.before.items()}
        new = self.score("actor", after)
        return after, Reference(self.text.tolist(), new, self.precision, self.previous, self.stored)

    def judge(self, weights, reference):
        return judge(self.score("engine", weights), reference, self.precision)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def case(request, tmp_path_factory):
    path = save(tmp_path_factory.mktemp("model"), spread=0.05, num_hidden_layers=3)
    return Case(path, request.param)


WRONG = {  # a weight before and after the update -> the wrong one that the engine has
    "one update earlier": lambda name, before, after: before,
    "stale layer": lambda name, before, after: before if ".layers.1." in name else after,
    # so the router sends tokens to the wrong one of two experts
    "exchanged experts": lambda name, before, after: (
        after[[1, 0, *range(2, 8)]] if "layers.1.mlp.experts" in name else after
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights_are_noticed(case, what):
    for seed in range(2):
        after, reference = case.update(seed)
        weights = {name: WRONG[what](name, case.before[name], weight) for name, weight in after.items()}
        with pytest.raises(EngineFault, match="weights are not the policy's"):
            case.judge(weights, reference)


def test_stale_weights_within_the_tolerance_are_noticed_by_comparing_with_the_previous_policy(case):
    """They are within the tolerance only in bfloat16."""
    _, reference = case.update(0)
    with pytest.raises(EngineFault) as error:
        case.judge(case.before, replace(reference, stored=None))
    assert ("those of the previous policy" in str(error.value)) is (case.precision == "bfloat16")


def test_right_weights_raise_no_false_alarm(case):
    """Neither after an update nor if the policy has not changed at all."""
    unmoved = Reference(case.text.tolist(), case.previous, case.precision, case.previous, case.stored)
    assert case.judge(case.before, unmoved).nearer is None
    assert min(case.judge(*case.update(seed)).nearer for seed in range(TRIALS)) > 4
