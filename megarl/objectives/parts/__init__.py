"""Building blocks that objectives share: ratios, clipping, vetoes, batch statistics, metrics."""
