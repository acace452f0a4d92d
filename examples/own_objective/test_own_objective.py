"""OwnObjective by hand: run `python test_own_objective.py`, or pytest."""

import torch
from own_objective import OwnObjective

from megarl.batch import TokenBatch


def test_value_and_gradient_of_four_tokens() -> None:
    ratios = torch.tensor([1.0, 0.5, 2.0, 8.0])
    rollout = torch.full((4,), -2.0)
    logprobs = (rollout + ratios.log()).requires_grad_()
    batch = TokenBatch(
        logprobs=logprobs,
        rollout_logprobs=rollout,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),  # two responses of two tokens
        loss_mask=torch.tensor([True, True, True, True]),
        cu_seqlens=torch.tensor([0, 2, 4], dtype=torch.int32),
    )
    terms = OwnObjective(ratio_max=5.0)(batch)
    weights = torch.tensor([1.0, 0.5, 2.0, 5.0])
    torch.testing.assert_close(terms.loss, -weights * batch.advantages * logprobs)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -weights * batch.advantages)  # none through the weights
    assert terms.kept.all()


if __name__ == "__main__":
    test_value_and_gradient_of_four_tokens()
    print("passed")
