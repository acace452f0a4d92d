"""What several objectives share: ratios, clipping, vetoes, batch statistics, metrics."""
