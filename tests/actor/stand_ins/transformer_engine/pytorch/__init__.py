"""Layers that take exactly the arguments of Transformer Engine 2.6, in the same order."""

import torch
import torch.nn.functional as F

from transformer_engine.pytorch import distributed, fp8, ops  # noqa: F401


def _parameter(*shape, dtype, device=None):
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


class _Module(torch.nn.Module):
    fp8 = fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}  # noqa: RUF012

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)  # as without fp8

    def set_extra_state(self, state): ...

    def init_fp8_metadata(self, num_gemms=1): ...

    def set_tensor_parallel_group(self, group): ...


class RMSNorm(_Module):
    def __init__(
        self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
        hidden_size=None, **kwargs,
    ):  # fmt: skip
        super().__init__()
        assert not zero_centered_gamma and kwargs.keys() <= {"device", "dtype"}  # Transformer Engine's takes no others
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape or hidden_size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class LayerNorm(RMSNorm): ...


class Linear(_Module):
    def __init__(
        self, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False, tp_group=None,
        tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True, return_bias=False,
        params_dtype=None, parallel_mode=None, parameters_split=None, device="cuda", ub_overlap_ag=False,
        ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_dgrad=False, ub_bulk_wgrad=False, ub_name=None,
        delay_wgrad_compute=False, symmetric_ar_type=None, save_original_input=False, name=None,
    ):  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.parallel_mode, self.return_bias = parallel_mode, return_bias
        assert tp_size == 1, "one rank"
        self.weight = _parameter(out_features, in_features, dtype=params_dtype)
        if init_method is not None:
            init_method(self.weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        if self.return_bias:
            return F.linear(inp, self.weight), self.bias
        return F.linear(inp, self.weight, self.bias if self.use_bias else None)


class LayerNormLinear(Linear):
    def __init__(
        self, in_features, out_features, eps=1e-5, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, init_method=None, bias=True, normalization="LayerNorm",
        return_bias=False, params_dtype=None, parallel_mode=None, return_layernorm_output=False,
        return_layernorm_output_gathered=False, parameters_split=None, zero_centered_gamma=False, device="cuda",
        ub_overlap_ag=False, ub_overlap_rs=False, ub_overlap_rs_dgrad=False, ub_bulk_wgrad=False, ub_bulk_dgrad=False,
        ub_name=None, delay_wgrad_compute=False, symmetric_ar_type=None, name=None,
    ):  # fmt: skip
        super().__init__(
            in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_size=tp_size, bias=bias,
            init_method=init_method, return_bias=return_bias, params_dtype=params_dtype, parallel_mode=parallel_mode,
        )  # fmt: skip
        assert normalization == "RMSNorm" and not return_layernorm_output and not zero_centered_gamma
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        self.layer_norm_weight.sequence_parallel = sequence_parallel

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        normalised = F.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps)
        return super().forward(normalised, is_first_microbatch)


class GroupedLinear(_Module):
    def __init__(
        self, num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True,
        return_bias=False, params_dtype=None, parallel_mode=None, device="cuda", ub_overlap_rs=False,
        ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, save_original_input=False,
    ):  # fmt: skip
        super().__init__()
        self.num_gemms, self.use_bias, self.parallel_mode = num_gemms, bias, parallel_mode
        assert not bias and tp_size == 1
        for i in range(num_gemms):
            weight = _parameter(out_features, in_features, dtype=params_dtype)
            if init_method is not None:
                init_method(weight)
            self.register_parameter(f"weight{i}", weight)

    def forward(self, inp, m_splits, is_first_microbatch=None):
        assert isinstance(m_splits, list) and len(m_splits) == self.num_gemms
        parts = inp.split(m_splits)
        return torch.cat([part @ getattr(self, f"weight{i}").t() for i, part in enumerate(parts)])


class DotProductAttention(_Module):
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0, qkv_format="sbhd",
        attn_mask_type="causal", window_size=None, sequence_parallel=False, tp_size=1, get_rng_state_tracker=None,
        tp_group=None, layer_number=None, attention_type="self", cp_group=None, cp_global_ranks=None, cp_stream=None,
        cp_comm_type="p2p", softmax_scale=None,
    ):  # fmt: skip
        super().__init__()
        assert attention_dropout == 0 and tp_size == 1 and attention_type == "self"
        self.scale = softmax_scale or kv_channels**-0.5

    def forward(
        self, query_layer, key_layer, value_layer, attention_mask=None, qkv_format=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None,
        attn_mask_type=None, window_size=None, checkpoint_core_attention=False, core_attention_bias_type="no_bias",
        core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None, pad_between_seqs=None,
    ):  # fmt: skip
        assert qkv_format == "thd" and attn_mask_type == "padding_causal", (qkv_format, attn_mask_type)
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert (max_seqlen_q, max_seqlen_kv) == (max(lengths), max(lengths)) and sum(lengths) == len(query_layer)
        outputs = []
        for q, k, v in zip(*(x.split(lengths) for x in (query_layer, key_layer, value_layer)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)
