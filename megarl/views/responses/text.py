"""Text for a terminal: long texts are shortened and tables aligned."""

from __future__ import annotations

from collections.abc import Collection, Sequence

SHOWN = 1200  # characters that are left of a long text, half of them from its end


def shorten(text: str) -> str:
    """``text`` without its middle if it has more than `SHOWN` characters."""
    left_out = len(text) - SHOWN
    if left_out <= 0:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), gap: str = "  ") -> list[str]:
    """A line for each row, with cells below each other; the columns ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
