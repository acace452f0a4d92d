import torch


def moe_permute(inp, routing_map, num_out_tokens=-1, max_token_num=-1, map_type="mask"):
    tokens = routing_map.t().nonzero()[:, 1]
    assert len(tokens) == num_out_tokens
    return inp[tokens], tokens


def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens=-1):
    permuted, tokens = moe_permute(inp, routing_map, num_out_tokens)
    return permuted, probs.t()[routing_map.t()], tokens


def moe_unpermute(inp, row_id_map, merging_probs=None, restore_shape=None, map_type="mask", probs=None):
    assert merging_probs is None
    return torch.zeros(restore_shape, dtype=torch.float32).index_add(0, row_id_map, inp.float()).to(inp.dtype)


def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    parts = inp.split(split_sizes.tolist())
    return torch.cat([parts[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
    return moe_sort_chunks_by_index(inp, split_sizes, sorted_index), moe_sort_chunks_by_index(
        probs, split_sizes, sorted_index
    )
