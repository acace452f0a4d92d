"""The report in a real browser: its charts are drawn, and it makes no request."""

import os
import re
import shutil

import pytest
from playwright.sync_api import sync_playwright

from megarl.views.report import write_report
from tests.views.synthetic_run import make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None and os.environ.get("MEGARL_REQUIRE_BROWSER") != "1":
    pytest.skip("chromium is not installed (MEGARL_REQUIRE_BROWSER=1 makes this a failure)", allow_module_level=True)


@pytest.fixture
def show():
    """A function that opens a page in a browser, waits until its charts are drawn, and returns the tab."""
    assert BROWSER, "MEGARL_REQUIRE_BROWSER=1, but there is no chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])

        def opened(page):
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            tab.problems, tab.asked = [], []  # what its console says, the addresses that it asks for
            tab.route(re.compile("https?:"), lambda route: tab.asked.append(route.request.url) or route.abort())
            tab.on("console", lambda message: tab.problems.append(message.text))
            tab.on("pageerror", lambda error: tab.problems.append(str(error)))
            tab.goto(page.as_uri())
            tab.wait_for_function("[...document.querySelectorAll('.plot')].every(e => e.querySelector('svg'))")
            return tab

        yield opened


def drawn_curves(body, number):
    """The SVG paths of the curves that the browser has drawn in a chart."""
    chart = body[body.index(f'id="chart-{number}"') :]
    paths = re.findall(r"<path [^>]*>", chart[: chart.index("</section>")])
    return [path for path in paths if 'class="js-line"' in path and re.search(r' d="M[-0-9.]+,[-0-9.]+[LHVC]', path)]


def test_charts_and_numbers_of_one_run_and_no_request(tmp_path, show):
    """An image in the report is blocked by its content security policy; that of another page is asked for."""
    page = write_report([make_run(tmp_path / "first_run")], tmp_path / "report.html")
    page.write_text(page.read_text().replace("<main>", '<main><img src="http://example.com/policy.png">'))
    (tmp_path / "asks.html").write_text('<img src="http://example.com/seen.png">')
    tab = show(page)
    dom = tab.content()
    body = dom[: dom.index('<script type="text/plain"')] + dom[dom.rindex("</script>") :]  # without Plotly's source
    assert tab.asked == []
    (blocked,) = tab.problems
    assert "policy.png" in blocked and "Content Security Policy" in blocked
    assert show(tmp_path / "asks.html").asked == ["http://example.com/seen.png"]
    titles = re.findall(r'<section class="card"><h2>(.*?)</h2>', body)
    assert len(titles) == body.count('class="plot js-plotly-plot"') == 20
    for number in range(15):
        assert drawn_curves(body, number), titles[number]
    assert len(drawn_curves(body, 3)) == 5, "four quantiles and a median"
    assert len(re.findall(r'class="point[ "]', body)) == 4 + 10, "evaluations, phases"
    for name in ("clip", "veto", "before", "after clip and veto", "rollout", "optimize", "evaluate", "stage 3"):
        assert re.search(rf">{re.escape(name)}</text>", body), name
    for number in ("0.281 ± 0.028", "0.902 ± 0.018", "+0.621", "288 / 288", "288,000", "1 min 40 s"):
        assert f"<td>{number}</td>" in body, number
    assert tab.evaluate("document.documentElement.scrollWidth") == 1400, "nothing is wider than the window"
