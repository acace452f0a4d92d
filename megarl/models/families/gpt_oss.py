"""gpt-oss: not supported yet. Attention has sinks and windows, experts have biases and a clamped activation."""

REFUSAL = (
    "Megatron-Core 0.16.1 has attention sinks (softmax_type) and windows (window_size) for packed sequences in "
    "Transformer Engine's layers alone, and megarl does not use them yet"
)
