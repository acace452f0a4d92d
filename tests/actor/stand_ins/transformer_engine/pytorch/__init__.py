"""Layers that take exactly the arguments of Transformer Engine, in the same order."""

import torch
import torch.nn.functional as F

from transformer_engine import __version__
from transformer_engine.pytorch import distributed, fp8, ops  # noqa: F401
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, fp8_autocast  # noqa: F401


def _parameter(*shape, dtype, device=None):
    return torch.nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


class _Module(torch.nn.Module):
    fp8 = fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}  # noqa: RUF012

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state): ...

    def init_fp8_metadata(self, num_gemms=1): ...

    def set_tensor_parallel_group(self, group): ...


class RMSNorm(_Module): ...  # likewise


class LayerNorm(_Module): ...  # likewise


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
        self.save_original_input = save_original_input
        assert tp_size == 1, "one rank"
        self.weight = _parameter(out_features, in_features, dtype=params_dtype)
        if init_method is not None:
            init_method(self.weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype))

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        if self.return_bias:
            return F.linear(inp, self.weight), self.bias
        return F.linear(inp, self.weight) + (self.bias if self.use_bias else 0)


class LayerNormLinear(Linear): ...  # Megatron derives a class from it, which megarl does not use


class GroupedLinear(_Module):
    def __init__(
        self, num_gemms, in_features, out_features, sequence_parallel=False, fuse_wgrad_accumulation=False,
        tp_group=None, tp_size=1, get_rng_state_tracker=None, rng_tracker_name=None, init_method=None, bias=True,
        return_bias=False, params_dtype=None, parallel_mode=None, device="cuda", ub_overlap_rs=False,
        ub_overlap_ag=False, ub_name=None, delay_wgrad_compute=False, save_original_input=False, name=None,
    ):  # fmt: skip
        super().__init__()
        assert name is None or __version__ != "2.9.0", "an argument since 2.11"
        self.num_gemms, self.use_bias, self.parallel_mode = num_gemms, bias, parallel_mode
        self.save_original_input = save_original_input
        assert tp_size == 1
        self.return_bias = return_bias
        for i in range(num_gemms):
            weight = _parameter(out_features, in_features, dtype=params_dtype)
            if init_method is not None:
                init_method(weight)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", _parameter(out_features, dtype=params_dtype))

    def forward(self, inp, m_splits, is_first_microbatch=None):
        assert isinstance(m_splits, list) and len(m_splits) == self.num_gemms
        parts = inp.split(m_splits)
        products = [F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]
        if not self.use_bias:
            return torch.cat(products)
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        if self.return_bias:
            return torch.cat(products), biases
        return torch.cat([product + bias for product, bias in zip(products, biases, strict=True)])


class DotProductAttention(_Module): ...  # likewise
