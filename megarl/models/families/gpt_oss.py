"""gpt-oss: not supported yet. Attention has sinks and windows, experts have biases and a clamped activation."""

REFUSAL = (
    "in Megatron-Core 0.16.1 and 0.19.2 attention sinks (softmax_type) and windows (window_size) over packed "
    "sequences, and grouped experts with biases, are in Transformer Engine's layers alone; megarl's own have none of "
    "them, and MXFP4 weights are not read"
)
