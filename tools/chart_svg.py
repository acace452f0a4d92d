"""Charts of a page that megarl made, as SVG for a document.

They count from 0, in the order of the page. Needs playwright and a chromium on the path.
"""

from __future__ import annotations

import shutil
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import sync_playwright

# Plotly gives the parts of a drawing random names; the same chart is to be the same file
SEEDED = "let state = 1; Math.random = () => (state = state * 16807 % 2147483647) / 2147483647;"
SIZE = {"width": 900, "height": 520}
# on white, whatever the theme of the reader: an image does not follow it
DRAW = """async ([id, size]) => {
  const chart = document.getElementById(id);
  const layout = {...chart.layout, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff"};
  return await Plotly.toImage({data: chart.data, layout}, {format: "svg", ...size});
}"""


def charts_svg(page: Path, numbers: Sequence[int]) -> list[str]:
    """The charts as SVG texts."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(color_scheme="light")
        tab.add_init_script(SEEDED)
        tab.goto(page.resolve().as_uri())
        urls = []
        for number in numbers:
            tab.wait_for_selector(f"#chart-{number} .main-svg")
            urls.append(tab.evaluate(DRAW, [f"chart-{number}", SIZE]))
        browser.close()
    return [urllib.parse.unquote(url.partition(",")[2]) + "\n" for url in urls]
