"""One call for a whole micro-batch, of flash attention or of the kernel for short pieces, against one per length."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megarl.actor import attention as module
from megarl.actor.attention import PackedAttention, PackedSequences, attended
from megarl.actor.model import build_model, transformer_config
from megarl.actor.packing import Sample, _pieces, _segments
from megarl.batch import ContextShard
from megarl.kernels.rms_norm import rms_norm
from tests.actor.conftest import EXPERTS, make_recipe, read_settings
from tests.rehearsal.cuda_only import KERNELS

pytestmark = pytest.mark.usefixtures("one_rank")
HF = EXPERTS | dict(model_type="qwen3", num_experts=None)
GPT_OSS = EXPERTS | dict(model_type="gpt_oss", num_experts=4, sliding_window=6, swiglu_limit=7.0)
LENGTHS = np.array([4, 4, 12, 20])
KINDS = {  # (model, number of a layer from 1, dtype); not bfloat16 for sinks, whose gradient sums all tokens' roundings
    "all keys": (HF, 1, torch.bfloat16),
    "a window and sinks": (GPT_OSS, 1, torch.float16),
    "sinks": (GPT_OSS, 2, torch.float16),
}
PATHS = [*((kind, path) for kind in KINDS for path in ("_by_size", "_fused")), ("all keys", "short")]


@pytest.fixture(autouse=True)
def flash_attention_on_the_cpu():
    """The two operators in plain torch, with the longest lengths that a GPU's kernels trust."""

    def checked(function, first):
        def call(*arguments, **options):
            cu_q, cu_k, *longest = arguments[first : first + 4]
            assert [int(cu.diff().max()) for cu in (cu_q, cu_k)] == longest
            assert cu_q.dtype == cu_k.dtype == torch.int32
            return function(*arguments, **options)

        return call

    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, first in (("_flash_attention_forward", 3), ("_flash_attention_backward", 6)):
            library.impl(name, checked(KERNELS[name], first), "CPU")
        yield


def attention_and_inputs(tokens, kind="all keys", width=16):
    torch.manual_seed(0)
    shapes = ((tokens, 4, width), (tokens, 2, width), (tokens, 2, width))
    hf, layer, dtype = KINDS[kind]
    attention = PackedAttention(transformer_config(hf, make_recipe()), layer)
    if attention.softmax_offset is not None:
        torch.nn.init.normal_(attention.softmax_offset)
    return attention, [torch.randn(s).to(dtype) for s in shapes]


def packed(pieces, tokens, ranks=1):
    pieces = attended(pieces, tokens, tokens * ranks, torch.device("cpu"))
    return PackedSequences(qkv_format="thd", attended=pieces)


def alone(lengths):
    """Each sequence attends to itself."""
    places = np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
    return packed([(own, own) for own in places], lengths.sum())


def run(attention, inputs, sequences, path):
    """Output and gradients; by flash attention in half precision, otherwise in float32."""
    fused = path == "_fused"
    inputs = [x.detach().clone().requires_grad_() for x in (inputs if fused else [x.float() for x in inputs])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "backend", "cpp" if path == "short" else "torch")
        patch.setattr(attention, "_by_size", getattr(attention, path, None) or attention._by_size)
        out = attention._attend(*inputs, sequences)
        return [out, *torch.autograd.grad(out, [*inputs, *attention.parameters()], torch.ones_like(out))]


@pytest.mark.parametrize(
    ("kind", "path", "width"), [*((*path, 16) for path in PATHS), *(("all keys", "short", 32 << i) for i in range(3))]
)
def test_attention_equals_a_softmax_written_out_for_each_query(kind, path, width):
    """The softmax is over the keys of the query's window and the sink, a logit without a value."""
    attention, inputs = attention_and_inputs(int(LENGTHS.sum()), kind, width)
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
    out = torch.stack(rows).view(-1, 4 * width)
    wanted = [query, key, value, *([sinks] if sinks.requires_grad else [])]
    expected = [out, *torch.autograd.grad(out, wanted, torch.ones_like(out))]
    tolerance = 2**-7 if path == "_fused" else 1e-5
    for a, b in zip(run(attention, inputs, alone(LENGTHS), path), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("kind", "path"), [path for path in PATHS if path[1] != "_by_size"])
def test_one_call_for_both_chunks_of_a_context_parallel_rank_equals_whole_sequences(kind, path, rank, monkeypatch):
    attention, whole = attention_and_inputs(int(LENGTHS.sum()), kind)
    whole = whole if path == "_fused" else [x.float() for x in whole]
    shards = [ContextShard(None, r, 2) for r in (0, 1)]
    held = [torch.from_numpy(s.held_tokens(LENGTHS)) for s in shards]
    everyone = {id(x): torch.cat([x[index] for index in held]) for x in whole[1:]}
    mine = [x[held[rank]] for x in whole]
    gathered = iter([everyone[id(x)] for x in whole[1:]])
    monkeypatch.setattr(module, "gather_from_sequence_parallel_region", lambda x, group: next(gathered))
    segments = _segments([Sample(np.zeros(1), np.zeros(n), np.zeros(n), 0.0) for n in LENGTHS], share=False)
    sequences = packed(_pieces(segments, LENGTHS, shards[rank], by_size=False), len(held[rank]), 2)
    sequences.shard = shards[rank]
    monkeypatch.setattr(attention, "backend", "cpp" if path == "short" else "torch")
    monkeypatch.setattr(attention, "_by_size", attention._fused)
    out = attention._attend(*mine, sequences)
    monkeypatch.undo()
    expected = run(attention, whole, alone(LENGTHS), "_by_size")[0][held[rank]]
    tolerance = 2**-7 if path == "_fused" else 1e-5
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "path"), PATHS)
def test_responses_that_share_a_prompt_attend_as_whole_sequences_do(kind, path):
    """Outputs and gradients; that of the prompt's keys is the sum over the whole sequences."""
    prompts = ([1, 2, 3, 4], [5, 6, 7], [8])
    samples = [
        Sample(np.array(prompts[p]), np.arange(n), np.zeros(n, np.float32), 0.0)
        for p, n in ((0, 2), (1, 7), (1, 12), (0, 17), (2, 22), (1, 27))
    ]
    segments = _segments(samples, share=True)
    lengths = np.array([s.length for s in segments])
    assert lengths.tolist() == [2, 7, 12, 17, 22, 27, 3, 2]  # the prompt of one token has nothing to share
    places = np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
    stems = [None if s.stem is None else places[s.stem] for s in segments]
    whole = [own if stem is None else np.concatenate([stem, own]) for stem, own in zip(stems, places, strict=True)][:6]
    attention, inputs = attention_and_inputs(int(lengths.sum()), kind)
    sequences = packed(_pieces(segments, lengths, None, path != "_fused"), lengths.sum())
    assert (sequences.attended.queries is None) == (path == "_fused")
    shared = run(attention, inputs, sequences, path)

    inputs = [x.float().requires_grad_() for x in inputs]
    rows = np.concatenate(whole)
    separate = attention._attend(*[x[rows] for x in inputs], alone(np.array([len(x) for x in whole])))
    expected = torch.stack([separate[np.flatnonzero(rows == place)[-1]] for place in range(lengths.sum())])
    gradients = torch.autograd.grad(expected, [*inputs, *attention.parameters()], torch.ones_like(expected))
    tolerance = 2**-6 if path == "_fused" else 1e-5
    for a, b in zip(shared, [expected, *gradients], strict=True):
        torch.testing.assert_close(a.float(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(3, 33), (600, 2, 64)])  # more than one block of rows
def test_the_norm_in_cpp_equals_torchs_in_float64(shape):
    x, weight, gradient = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    found = []
    for dtype, backend in ((torch.float64, "torch"), (torch.float32, "cpp")):
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        out = rms_norm(*inputs, 1e-6, backend)
        found.append([out, *torch.autograd.grad(out, inputs, gradient.to(dtype))])
    for expected, one in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("most", "backend"), [(24, "cpp"), (25, "torch")])
def test_the_kernel_is_chosen_for_a_run_and_not_for_a_micro_batch(tmp_path, most, backend):
    """Else another split into micro-batches would give other last bits."""
    recipe = make_recipe(data={"max_prompt_tokens": 8}, rollout={"max_response_tokens": most})
    (model,) = build_model(read_settings(tmp_path, "qwen3"), recipe)
    found = [module.backend for module in model.modules() if isinstance(module, PackedAttention)]
    assert found == [backend] * len(model.decoder.layers)
