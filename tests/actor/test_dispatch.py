"""Dispatch of tokens to their experts and back: order and sums.

`tests/rehearsal/on_device/test_updates.py` counts waits for the device.
"""

import pytest
import torch

from megarl.actor.dispatch import IndexDispatcher, chunk_order, get_default_pg_collection
from megarl.actor.model import build_model, transformer_config
from tests.actor.conftest import EXPERTS, make_recipe

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_gets_the_sum_of_its_experts(dtype):
    """The rows of an expert are in the order of their tokens; sums are taken in float32 and rounded once."""
    torch.manual_seed(0)
    config = transformer_config(EXPERTS | {"num_experts": 5}, make_recipe())
    config.moe_router_topk = 3
    dispatcher = IndexDispatcher(range(5), config, get_default_pg_collection())
    hidden = torch.randn(7, 1, 32).to(dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(7)])
    routing_map = torch.zeros(7, 5, dtype=torch.bool).scatter(1, chosen, True)
    probs = torch.where(routing_map, torch.rand(7, 5), 0).requires_grad_()
    rows, counts, row_probs = dispatcher.dispatch_postprocess(
        *dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, routing_map, probs))
    )
    pairs = [(e, t) for e in range(5) for t in range(7) if routing_map[t, e]]
    assert torch.equal(rows, torch.stack([hidden[t, 0] for _, t in pairs]))
    assert torch.equal(row_probs, torch.stack([probs[t, e] for e, t in pairs]))
    assert counts.tolist() == routing_map.sum(0).tolist()

    outputs = torch.randn_like(rows).requires_grad_()
    total = dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(outputs)))
    expected = torch.zeros(7, 32).index_add(0, torch.tensor([t for _, t in pairs]), outputs.detach().float())
    assert total.shape == hidden.shape
    torch.testing.assert_close(total[:, 0], expected.to(dtype), rtol=0, atol=1e-6)
    gradient = torch.randn_like(total)
    total.backward(gradient)
    assert torch.equal(outputs.grad, torch.stack([gradient[t, 0] for _, t in pairs]))
    gradient = torch.randn_like(rows)
    rows.backward(gradient)
    expected = torch.zeros(7, 32).index_add(0, torch.tensor([t for _, t in pairs]), gradient.float())
    torch.testing.assert_close(hidden.grad[:, 0], expected.to(dtype), rtol=0, atol=1e-6)


def test_chunks_of_several_ranks_are_sorted_by_expert():
    chunks = torch.tensor([[2, 0, 3], [1, 4, 0]])  # rank 0 sent 2 rows to expert 0 and 3 to expert 2
    assert chunk_order(chunks, 10).tolist() == [0, 1, 5, 6, 7, 8, 9, 2, 3, 4]


def test_megatron_logs_no_warning_about_layers_of_experts(caplog):
    """It would warn, once a layer, about a feed-forward module of a type that it does not know."""
    with caplog.at_level("WARNING"):
        build_model(EXPERTS | {"num_experts": 4}, make_recipe())
    assert not caplog.records, caplog.text
