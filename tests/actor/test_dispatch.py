"""Dispatch of tokens to their experts and back: order, sums, and no waits for the device."""

import pytest
import torch

from megarl.actor.dispatch import IndexDispatcher, chunk_order, get_default_pg_collection
from megarl.actor.model import build_model, transformer_config
from megarl.actor.packing import micro_batches
from tests.actor.conftest import EXPERTS, make_recipe, read_settings
from tests.actor.test_step import make_samples

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


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3_moonlight"])
def test_layers_do_not_wait_for_the_device(tmp_path, family):
    """Forward and backward pass on the meta device, where `.item()`, `.tolist()` and indexing by a mask raise."""
    meta = torch.device("meta")
    recipe = make_recipe(actor={"recompute": "full", "kernels": "torch"})
    (model,) = build_model(read_settings(tmp_path, family), recipe)
    (batch,) = micro_batches(make_samples(), 100, meta)
    model.to(meta, torch.bfloat16)  # as on GPUs; `grouped_mm` takes no float32 on the meta device
    model.config.params_dtype = torch.bfloat16
    latent = model.config.multi_latent_attention
    rotary = model.decoder.layers[0].self_attention.rotary_pos_emb if latent else model.rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq.to(meta)
    model.post_process = False  # the log-probs are not part of the layers
    output = model(batch.tokens, batch.positions, None, packed_seq_params=batch.packed)
    output.backward(torch.empty_like(output))
    assert all(p.grad is not None for name, p in model.decoder.named_parameters() if "final" not in name)


def test_megatron_logs_no_warning_about_layers_of_experts(caplog):
    """It would warn, once a layer, about a feed-forward module of a type that it does not know."""
    with caplog.at_level("WARNING"):
        build_model(EXPERTS | {"num_experts": 4}, make_recipe())
    assert not caplog.records, caplog.text
