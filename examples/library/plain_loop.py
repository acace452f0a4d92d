"""megarl's objectives in a loop of one's own: a policy over five letters learns from frozen samples that "c" is right.

python examples/library/plain_loop.py
"""

from __future__ import annotations

import torch

from megarl.objectives import build_objective, padded_terms, summarise

RESPONSES, LENGTH, LETTERS, RIGHT = 64, 4, 5, 2


def main(name: str = "mu_grpo", updates: int = 60) -> float:
    """Share of right letters that the policy expects at the end."""
    torch.manual_seed(0)
    objective = build_objective(name, {})
    logits = torch.zeros(LENGTH, LETTERS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    with torch.no_grad():  # the rollouts, generated once
        letters = torch.distributions.Categorical(logits=logits).sample((RESPONSES,))
        rollout_logprobs = logits.log_softmax(-1)[torch.arange(LENGTH), letters]
    rewards = (letters == RIGHT).float().mean(-1)
    advantages = (rewards - rewards.mean()) / rewards.std()
    mask = torch.ones(RESPONSES, LENGTH, dtype=torch.bool)
    for update in range(updates):
        logprobs = logits.log_softmax(-1)[torch.arange(LENGTH), letters]
        terms = padded_terms(objective, logprobs, rollout_logprobs, advantages, mask)
        loss = terms.loss.sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 20 == 0:
            numbers = summarise(terms.metrics, terms.histograms)
            print(f"update {update}: kept {numbers['kept_fraction']:.2f}, ess {numbers['ess']:.2f}")
    return float(logits.softmax(-1)[:, RIGHT].mean())


if __name__ == "__main__":
    print(f"expected share of right letters: {main():.2f}")
