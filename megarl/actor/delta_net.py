"""The gated delta net in plain torch, over packed sequences; in Megatron's layers it replaces attention.

Megatron-Core has its own: that of 0.16.1 supports neither packed sequences nor context parallelism, that of 0.19.2
supports both, and each needs flash-linear-attention, which runs only on GPUs. Tensor-parallel ranks divide the key
heads, each with the value heads that share it. Context-parallel ranks exchange parts of sequences for parts of heads
(all-to-all), so that each rank runs the delta rule over whole sequences of some heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from megarl.actor.attention import PackedSequences
from megarl.actor.delta_rule import causal_convolution, gated_delta_rule

LENGTH_EPSILON = 1e-6  # added to the squared length of a query or key before it is normalised, as transformers 5.19
_DIVIDED = ("in_proj_qkvz.weight", "in_proj_ba.weight", "A_log", "dt_bias")  # rows divided by tensor parallelism


class ConvolutionTaps(torch.nn.Conv1d):
    """The weight of the convolution; a call returns the rows of some key heads.

    It is read in a call because Megatron's DDP gathers updated weights during the forward pass
    (``overlap_param_gather``) and waits for those of a module just before its call.
    """

    def forward(self, widths: list[int], first: int, heads: int) -> torch.Tensor:  # type: ignore[override]
        """The taps [C, 1, K] of ``heads`` key heads from ``first`` on: for each its query, its key and its values.

        widths: channels of a key head's query, key and values.
        """
        total = self.out_channels // sum(widths)
        parts = self.weight.split([total * width for width in widths])
        return torch.cat([part.unflatten(0, (total, -1))[first : first + heads] for part in parts], 1).flatten(0, 1)


class GatedDeltaNet(MegatronModule):
    """A layer from [T / tp, 1, hidden] to the same shape.

    Parameters have the names and the row order of Qwen3-Next in transformers 5.19. in_proj_qkvz: for each key head its
    query, key, values and gates of the values; in_proj_ba: for each key head its rates, then its decays; conv1d: the
    queries of all heads, then the keys, then the values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.layer_number, self.tp_group, self.cp_group = layer_number, groups.tp, groups.cp
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_heads = config.linear_num_key_heads // self.tp_group.size()
        self.shared_by = config.linear_num_value_heads // config.linear_num_key_heads  # value heads per key head
        value_heads, dtype = self.key_heads * self.shared_by, config.params_dtype
        rows = self.key_heads * 2 * (self.key_width + self.shared_by * self.value_width)
        self.in_proj_qkvz = torch.nn.Linear(config.hidden_size, rows, bias=False, dtype=dtype)
        self.in_proj_ba = torch.nn.Linear(config.hidden_size, 2 * value_heads, bias=False, dtype=dtype)
        channels = config.linear_num_key_heads * (2 * self.key_width + self.shared_by * self.value_width)
        taps = config.linear_conv_kernel_dim
        self.conv1d = ConvolutionTaps(channels, channels, taps, groups=channels, bias=False, dtype=dtype)
        self.A_log = torch.nn.Parameter(torch.zeros(value_heads, dtype=dtype))
        self.dt_bias = torch.nn.Parameter(torch.ones(value_heads, dtype=dtype))
        self.norm = torch.nn.RMSNorm(self.value_width, eps=config.layernorm_epsilon, dtype=dtype)
        self.out_proj = RowParallelLinear(
            config.linear_num_value_heads * self.value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp_group,
        )
        for name in _DIVIDED:
            set_tensor_model_parallel_attributes(self.get_parameter(name), True, 0, 1)
        for whole in (self.conv1d.weight, self.norm.weight):
            # each rank has the gradient from its own heads; the attribute makes Megatron add these up
            whole.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Megatron's contract of attention: (output, bias). ``packed_seq_params.chunks`` must be set."""
        assert packed_seq_params is not None and packed_seq_params.chunks is not None, "megarl packs every batch"
        hidden = hidden_states[:, 0]
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        projected = self.in_proj_qkvz(hidden).unflatten(-1, (self.key_heads, -1))
        values = self.shared_by * self.value_width
        mixed, gate = projected.split([2 * self.key_width + values, values], -1)
        rates = self.in_proj_ba(hidden).unflatten(-1, (self.key_heads, -1))
        read = self._read(torch.cat([mixed, rates], -1), packed_seq_params)
        gate = gate.reshape(read.shape)
        gated = self.norm(read) * F.silu(gate.float())
        return self.out_proj(gated.to(gate.dtype).flatten(1)[:, None])[0], None

    def _read(self, mixed: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Projections [T, key heads, query + key + values + rates + decays] -> output of the delta rule
        [T, value heads, value width]. Exchanges sequences for heads between context-parallel ranks."""
        order = packed.chunks.gathered  # type: ignore[union-attr]
        if order is None:
            return self._rule(mixed, packed, 0)
        heads = self.key_heads // self.cp_group.size()
        whole = all_to_all_sp2hp(mixed.flatten(1), group=self.cp_group)
        whole = torch.empty_like(whole).index_put((order,), whole).unflatten(-1, (heads, -1))
        read = self._rule(whole, packed, heads * self.cp_group.rank())
        read = all_to_all_hp2sp(read.flatten(1).index_select(0, order), group=self.cp_group)
        return read.unflatten(-1, (-1, self.value_width))

    def _rule(self, mixed: torch.Tensor, packed: PackedSequences, first: int) -> torch.Tensor:
        """As `_read`, for whole sequences and this tensor-parallel rank's key heads from ``first`` on."""
        chunks, heads = packed.chunks, mixed.shape[1]
        assert chunks is not None
        values = self.shared_by * self.value_width
        mixed, rate, decay = mixed.split([2 * self.key_width + values, self.shared_by, self.shared_by], -1)
        widths = [self.key_width, self.key_width, values]
        taps = self.conv1d(widths, self.tp_group.rank() * self.key_heads + first, heads)
        convolved = F.silu(causal_convolution(mixed.flatten(1), taps, chunks))
        query, key, value = convolved.unflatten(-1, (heads, -1)).split(widths, -1)
        query, key = (_unit_length(x.float()).repeat_interleave(self.shared_by, 1) for x in (query, key))
        own = slice(first * self.shared_by, (first + heads) * self.shared_by)
        steps = F.softplus(decay.flatten(1).float() + self.dt_bias[own])
        read = gated_delta_rule(
            query,
            key,
            value.float().unflatten(-1, (self.shared_by, -1)).flatten(1, 2),
            -self.A_log[own].float().exp() * steps,
            rate.flatten(1).sigmoid().float(),
            chunks,
        )
        return read.to(mixed.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's contract; of the parameters, tensor parallelism divides those in ``_DIVIDED`` and out_proj."""
        own = {name: value for name, value in self.named_parameters() if not name.startswith("out_proj.")}
        axes = dict.fromkeys(_DIVIDED, 0)
        state = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets)
        return state | sharded_state_dict_default(self.out_proj, f"{prefix}out_proj.", sharded_offsets, metadata)


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPSILON)
