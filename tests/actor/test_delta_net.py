"""The gated delta rule over packed sequences equals the recurrence of each sequence alone."""

import torch

from megarl.actor.delta_rule import gated_delta_rule, sequence_chunks

RUNS = ((1, 1), (2, 16), (1, 17), (1, 40), (1, 33), (1, 5))  # not sorted at the end, where a packed axis has its filler
LENGTHS = [length for count, length in RUNS for _ in range(count)]
CPU = torch.device("cpu")


def random_inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(sum(LENGTHS), 2, *shape, generator=generator, dtype=torch.float64)

    query, key, value = normal(6), normal(6), normal(5)
    query, key = (x / x.norm(dim=-1, keepdim=True) for x in (query, key))
    return [x.requires_grad_() for x in (query, key, value, -normal().exp(), normal().sigmoid())]


def recurrence(query, key, value, decay, rate):
    """One sequence, token by token: Equation 10 of the paper (arXiv 2412.06464), queries scaled as in Qwen3-Next."""
    state, outputs = query.new_zeros(query.shape[1], key.shape[-1], value.shape[-1]), []
    for q, k, v, g, b in zip(query, key, value, decay, rate, strict=True):
        state = state * g.exp()[:, None, None]
        written = (v - (state * k[..., None]).sum(1)) * b[:, None]
        state = state + k[..., None] * written[:, None]
        outputs.append((state * q[..., None]).sum(1) / q.shape[-1] ** 0.5)
    return torch.stack(outputs)


def test_chunks_of_tokens_equal_the_recurrence():
    """Outputs and gradients, with full chunks and with partly filled ones."""
    inputs = random_inputs()
    chunked = gated_delta_rule(*inputs, sequence_chunks(RUNS, None, CPU, size=16))
    plain = torch.cat([recurrence(*parts) for parts in zip(*(x.split(LENGTHS) for x in inputs), strict=True)])
    torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-12)
    weight = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [torch.autograd.grad((x * weight).sum(), inputs) for x in (chunked, plain)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_is_finite_where_the_state_decays_to_zero():
    inputs = [x.detach() for x in random_inputs()]
    inputs[3] = torch.full_like(inputs[3], -90.0).requires_grad_()  # exp(16 * 90) is infinite
    (gradient,) = torch.autograd.grad(gated_delta_rule(*inputs, sequence_chunks(RUNS, None, CPU, 16)).sum(), inputs[3])
    assert gradient.isfinite().all()
