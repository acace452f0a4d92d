"""Qwen3-Next: not supported yet. Three of four layers are gated delta nets (Yang et al. 2024, arXiv 2412.06464)."""

REFUSAL = (
    "the gated delta net of Megatron-Core 0.16.1 takes no packed sequences; that of 0.19.2 does, on GPUs with "
    "flash-linear-attention alone, and megarl does not use it yet"
)
