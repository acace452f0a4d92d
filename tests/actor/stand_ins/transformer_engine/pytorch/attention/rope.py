import torch


def apply_rotary_pos_emb(
    t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False, fused=False, cu_seqlens=None, cp_size=1,
    cp_rank=0,
):  # fmt: skip
    """Rotate t [T, heads, d] by positions that begin at 0 in each sequence; freqs [longest, 1, 1, d'], d' <= d."""
    assert tensor_format == "thd" and fused and not interleaved and cp_size == 1
    angles = torch.cat([freqs[:n, 0] for n in cu_seqlens.diff().tolist()])
    t, rest = t[..., : angles.shape[-1]], t[..., angles.shape[-1] :]
    first, second = t.chunk(2, -1)
    turned = t * angles.cos().to(t.dtype) + torch.cat([-second, first], -1) * angles.sin().to(t.dtype)
    return torch.cat([turned, rest], -1)
