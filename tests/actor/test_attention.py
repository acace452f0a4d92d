"""One call of flash attention for a whole micro-batch, against one batched call per length as on other devices."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.actor.conftest import SHAPE, make_recipe
from tests.actor.flash import flash_attention_on

pytestmark = pytest.mark.usefixtures("one_rank")
HF = SHAPE | dict(model_type="qwen3", num_experts=None, rope_theta=1e4, rope_scaling_factor=None, rotary_fraction=1.0)
GPT_OSS = dict(
    model_type="gpt_oss", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, sliding_window=6,
    swiglu_limit=7.0, norm_topk_prob=True,
)  # fmt: skip
LENGTHS = np.array([4, 4, 12, 20])


KINDS = {  # (model, number of a layer from 1, dtype); not bfloat16 for sinks, whose gradient sums all tokens' roundings
    "all keys": (HF, 1, torch.bfloat16),
    "a window and sinks": (HF | GPT_OSS, 1, torch.float16),
    "sinks": (HF | GPT_OSS, 2, torch.float16),
}


def attention_and_inputs(tokens, kind="all keys"):
    from megarl.actor.attention import PackedAttention
    from megarl.actor.model import transformer_config

    torch.manual_seed(0)
    shapes = ((tokens, 4, 16), (tokens, 2, 16), (tokens, 2, 16))
    hf, layer, dtype = KINDS[kind]
    attention = PackedAttention(transformer_config(hf, make_recipe()), layer)
    if attention.softmax_offset is not None:
        torch.nn.init.normal_(attention.softmax_offset)
    return attention, [torch.randn(s).to(dtype) for s in shapes]


def packed(lengths, shard=None, **fields):
    from megarl.actor.attention import PackedSequences

    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    runs = tuple((int((lengths == n).sum()), int(n)) for n in np.unique(lengths))
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(lengths.max()),
        length_runs=runs,
        rotary=(torch.ones(1), torch.zeros(1)),
        shard=shard,
        **fields,
    )


def run(attention, inputs, sequences, fused):
    inputs = [x.clone().requires_grad_() for x in (inputs if fused else [x.float() for x in inputs])]
    wanted = [*inputs, *attention.parameters()]
    if fused:
        with flash_attention_on("CPU"):
            out = attention._fused(*inputs, sequences)
            return [out, *torch.autograd.grad(out, wanted, torch.ones_like(out))]
    out = attention(*inputs, packed_seq_params=sequences)
    return [out, *torch.autograd.grad(out, wanted, torch.ones_like(out))]


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_for_all_lengths_equals_one_call_per_length(kind):
    attention, inputs = attention_and_inputs(int(LENGTHS.sum()), kind)
    for a, b in zip(
        run(attention, inputs, packed(LENGTHS), True), run(attention, inputs, packed(LENGTHS), False), strict=True
    ):
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_a_softmax_written_out_for_each_query(kind):
    """The softmax is over the keys of the query's window and the sink, a logit without a value."""
    attention, inputs = attention_and_inputs(int(LENGTHS.sum()), kind)
    query, key, value = (x.double().requires_grad_() for x in inputs)
    hf, *_ = KINDS[kind]
    window = hf["sliding_window"] if "window" in kind else 99
    sinks = torch.full((4,), -torch.inf).double()
    if attention.softmax_offset is not None:
        sinks = attention.softmax_offset.detach().double().requires_grad_()
    rows = []
    for begin, end in pairwise([0, *np.cumsum(LENGTHS).tolist()]):
        for token in range(begin, end):
            seen = slice(max(begin, token + 1 - window), token + 1)
            for head in range(4):
                logits = key[seen, head // 2] @ query[token, head] / 4
                weights = torch.cat([logits, sinks[head : head + 1]]).softmax(0)[:-1]
                rows.append(weights @ value[seen, head // 2])
    out = torch.stack(rows).view(-1, 4 * 16)
    wanted = [query, key, value, *([sinks] if sinks.requires_grad else [])]
    expected = [out, *torch.autograd.grad(out, wanted, torch.ones_like(out))]
    for a, b in zip(run(attention, inputs, packed(LENGTHS), False), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_for_both_chunks_of_a_context_parallel_rank_equals_whole_sequences(kind, rank, monkeypatch):
    from megarl.actor import attention as module
    from megarl.actor.packing import _attended_keys
    from megarl.batch import ContextShard

    attention, whole = attention_and_inputs(int(LENGTHS.sum()), kind)
    shards = [ContextShard(None, r, 2) for r in (0, 1)]
    held = [torch.from_numpy(s.held_tokens(LENGTHS)) for s in shards]
    everyone = {id(x): torch.cat([x[index] for index in held]) for x in whole[1:]}
    mine = [x[held[rank]] for x in whole]
    gathered = iter([everyone[id(x)] for x in whole[1:]])
    monkeypatch.setattr(module, "gather_from_sequence_parallel_region", lambda x, group: next(gathered))
    attended = _attended_keys(LENGTHS, shards[rank], torch.device("cpu"))
    sequences = packed(LENGTHS, shards[rank], attended=attended)
    with flash_attention_on("CPU"):
        out = attention._fused(*mine, sequences)
    expected = run(attention, whole, packed(LENGTHS), False)[0][held[rank]]
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
