"""The report in a real browser: its charts are drawn, its tables have the right numbers, and it makes no request."""

import html
import http.server
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from typing import ClassVar

import pytest
from playwright.sync_api import sync_playwright

from megarl.commands.what_if import write_figure
from megarl.objectives import OBJECTIVES
from megarl.views.report import write_report
from tests.views.stored_run import IMAGE
from tests.views.synthetic_run import make_recipe, make_run
from tests.views.test_report_samples import hostile_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if BROWSER is None and os.environ.get("MEGARL_REQUIRE_BROWSER") != "1":
    pytest.skip("chromium is not installed (MEGARL_REQUIRE_BROWSER=1 makes this a failure)", allow_module_level=True)


class Proxy(http.server.BaseHTTPRequestHandler):
    """Records every request that the browser would send into the network, and answers it with 404."""

    seen: ClassVar[list[str]] = []

    def do_GET(self):
        self.seen.append(self.path)
        self.send_error(404)

    do_CONNECT = do_POST = do_GET

    def log_message(self, *ignored):
        pass


@pytest.fixture(scope="module")
def proxy():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def browse(page, profile, proxy, width=1400):
    """(the document after its scripts have run, without the scripts; what the browser logged)."""
    assert BROWSER, "MEGARL_REQUIRE_BROWSER=1, but there is no chromium"
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={profile}"]
    command += [f"--proxy-server={proxy}", "--virtual-time-budget=10000", f"--window-size={width},3000"]
    command += ["--enable-logging=stderr", "--dump-dom"]
    result = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    dom = result.stdout
    # without Plotly's source
    return dom[: dom.index('<script type="text/plain"')] + dom[dom.rindex("</script>") :], result.stderr


def drawn_curves(body, number):
    """The SVG paths of the curves that the browser has drawn in a chart."""
    chart = body[body.index(f'id="chart-{number}"') :]
    paths = re.findall(r"<path [^>]*>", chart[: chart.index("</section>")])
    return [path for path in paths if 'class="js-line"' in path and re.search(r' d="M[-0-9.]+,[-0-9.]+[LHVC]', path)]


def ticks(chart, axis):
    """[(distance from the chart's left edge or top, label without markup)] of the ticks that the browser has drawn."""
    texts = re.findall(rf'<g class="{axis}tick".*?</g>', chart, re.DOTALL)
    places = [re.search(r"translate\(([-0-9.]+),([-0-9.]+)\)", text).groups() for text in texts]
    return [
        (float(place["xy".index(axis)]), re.sub("<[^>]*>", "", text)) for place, text in zip(places, texts, strict=True)
    ]


NARROW = 500  # the narrowest window that the browser opens


def test_labels_of_logarithmic_axes_do_not_overlap(tmp_path, proxy):
    """Those of two decades, of three and of six."""
    page = write_report([make_run(tmp_path / "a")], tmp_path / "report.html")
    body, _ = browse(page, tmp_path / "profile", proxy)
    logarithmic = {"Second moment of the log-ratio (M2)", "Prefix occupancy", "Reverse chi-square of the prefixes"}
    for chart in body.split('<section class="card">')[1:]:
        if (title := re.search("<h2>(.*?)</h2>", chart)[1]) in logarithmic:
            logarithmic.remove(title)
            places = sorted(place for place, _ in ticks(chart, "y"))
            assert len(places) > 1, title
            assert min(b - a for a, b in itertools.pairwise(places)) > 16, title  # labels are 12 high
    assert not logarithmic


def test_a_narrow_window_hides_the_cells_that_are_missing(tmp_path, proxy):
    roots = [make_run(tmp_path / "a"), make_run(tmp_path / "b")]
    recipe = roots[1] / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('kind = "staged"', 'kind = "live"'))
    page = write_report(roots, tmp_path / "report.html")
    mark = 'for (const cell of document.querySelectorAll("td")) cell.id = getComputedStyle(cell).display'
    page.write_text(page.read_text().replace("</body>", f"<script>{mark}</script></body>"))
    cell = r'<td[^>]* id="([\w-]+)"><span class="head">(.*?)</span><span>(.*?)</span></td>'
    for width, hidden, shown in ((1400, "table-cell", "table-cell"), (NARROW, "none", "flex")):
        body, _ = browse(page, tmp_path / f"profile_{width}", proxy, width)
        cells = re.findall(cell, body)
        assert ("Trainers idle", "-") in [(name, text) for _, name, text in cells]
        assert {display for display, _, text in cells if text == "-"} == {hidden}
        assert {display for display, _, text in cells if text != "-"} == {shown}


def test_a_narrow_window_names_every_objective_of_what_if(tmp_path, proxy):
    names = ("fresh", *OBJECTIVES)
    rows = [
        {"update": update, "objective": name, "norm": [0.5, 0.4, 0.6], "kept": [0.9, 0.8, 1.0]}
        for update in (0, 5)
        for name in names
    ]
    write_figure(rows, "run", tmp_path / "what_if.html")
    body, errors = browse(tmp_path / "what_if.html", tmp_path / "profile", proxy, NARROW)
    assert "CONSOLE" not in errors, errors
    for chart in body.split('<section class="card">')[1:]:
        found = sorted(ticks(chart, "x"))
        assert [name for _, name in found] == list(names)
        assert min(b[0] - a[0] for a, b in itertools.pairwise(found)) > 9, "labels are 9 high, and turned by 90 degrees"
    assert "<tr><th>grpo, update 5</th>" in body and "<span>0.500 ± 0.100</span>" in body


def test_charts_and_numbers_of_one_run(tmp_path, proxy):
    page = write_report([make_run(tmp_path / "first_run")], tmp_path / "report.html")
    body, errors = browse(page, tmp_path / "profile", proxy)
    assert "CONSOLE" not in errors, errors
    titles = re.findall(r'<section class="card"><h2>(.*?)</h2>', body)
    assert len(titles) == body.count('class="plot js-plotly-plot"') == 23
    for number in range(15):
        assert drawn_curves(body, number), titles[number]
    assert len(drawn_curves(body, 2)) == 5, "four quantiles and a median"
    assert len(re.findall(r'class="point[ "]', body)) == 4 + 10 + 2, (
        "evaluations, phases, tokens that lose their gradient"
    )
    for name in ("clip", "veto", "before", "after clip and veto", "rollout", "optimize", "evaluate", "stage 3"):
        assert re.search(rf">{re.escape(name)}</text>", body), name
    for number in ("0.281 ± 0.028", "0.902 ± 0.018", "+0.621", "288 / 288", "288,000", "1 min 40 s"):
        assert f"<span>{number}</span></td>" in body, number


LAID_OUT = """() => {
  const boxes = (card, axis) => [...card.querySelectorAll(`g.${axis}tick text`)].map(t => t.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const labels = card => [...card.querySelectorAll("g.ytick text")].map(t => t.textContent);
  const shares = card => labels(card).filter(text => text.includes("%"));
  const overlap = all => all.some((a, n) => all.slice(n + 1).some(b => meet(a, b)));
  const outside = e => e.getBoundingClientRect().width && e.getBoundingClientRect().right > innerWidth + 1;
  return {
    width: document.documentElement.scrollWidth,
    wide: [...document.querySelectorAll("body *")].filter(outside).map(e => e.tagName),
    scrolls: [...document.querySelectorAll("body *")].filter(e => e.scrollWidth > e.clientWidth + 1
        && ["auto", "scroll"].includes(getComputedStyle(e).overflowX)).map(e => e.className),
    charts: [...document.querySelectorAll(".js-plotly-plot")].map(e => e.closest("section")).map(card => ({
      title: card.querySelector("h2").textContent,
      drawn: [...card.querySelectorAll("path.js-line")].filter(p => p.getAttribute("d")).length
        + card.querySelectorAll(".point, .heatmaplayer image").length,
      overlap: ["x", "y"].filter(axis => overlap(boxes(card, axis))),
      repeats: new Set(shares(card)).size < shares(card).length,
      lines: [...card.querySelectorAll("path.js-line")].map(p => p.getAttribute("d")),
    })),
  };
}"""


def laid_out(page, width):
    """What `LAID_OUT` finds in a window of this width, narrower than `NARROW` too."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": width, "height": 900})
        tab.goto(page.as_uri())
        tab.wait_for_function("[...document.querySelectorAll('.plot')].every(e => e.querySelector('svg'))")
        found = tab.evaluate(LAID_OUT)
        browser.close()
    return found


@pytest.mark.parametrize("width", [1300, 400])
def test_pages_fit_their_window_and_no_chart_is_empty_or_crowded(width, tmp_path):
    """The report of a run whose first update of a stage is on policy up to rounding, and has no gradient; what-if's of
    intervals wider than what is possible."""
    root = make_run(tmp_path / "run")
    updates = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    for record in updates[::96]:
        record |= {"grad_norm": 0.0, "m2/before": 1e-12, "m2/after": 1e-12, "ratio/q05": 1e-12}
    for record in updates:
        record |= {name: value / 200 for name, value in record.items() if name.endswith("_fraction")}
    (root / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in updates))
    rows = [
        {"update": update, "objective": name, "cosine": [0.6, -1.9, 3.1], "cosine_to_grpo": [0.3, -1.0, 1.7]}
        | {"norm": [102.0, -60.0, 264.0], "kept": [0.9, -0.2, 2.0]}
        for update in (0, 5)
        for name in ("fresh", *OBJECTIVES)
    ]
    write_figure(rows, "run", tmp_path / "what_if.html")
    for page in (write_report([root], tmp_path / "report.html"), tmp_path / "what_if.html"):
        found = laid_out(page, width)
        assert (found["width"], found["wide"], found["scrolls"]) == (width, [], [])
        assert found["charts"] and all(chart["drawn"] for chart in found["charts"])
        assert [chart["title"] for chart in found["charts"] if chart["overlap"] or chart["repeats"]] == []
        for norms in (chart["lines"] for chart in found["charts"] if chart["title"] == "Gradient norm"):
            heights = [float(y) for line in norms for y in re.findall(r"[ML][-\d.]+,([-\d.]+)", line)]
            assert max(heights, default=0) < 900, "a gradient of 0 draws no line out of the chart"


def test_markup_in_the_names_of_runs_and_objectives_is_escaped(tmp_path, proxy):
    image = "<img src=http://example.com/x.png onerror=alert(1)>"
    a = make_run(tmp_path / "a", recipe=make_recipe(name=image))
    b = make_run(tmp_path / "b <a href='http:··example.com'>", gain=0.5)
    body, _ = browse(write_report([a, b], tmp_path / "r.html"), tmp_path / "profile", proxy)
    assert "<img" not in body and "<a " not in body
    assert len(re.findall(r'class="legendtext"[^>]*>a clip</text>', body)) == 1
    assert len(re.findall(r'class="plot js-plotly-plot"', body)) == 23
    assert "<th>objective.name</th>" in body


def test_the_report_makes_no_request(tmp_path, proxy):
    """The browser is behind a proxy that records requests.

    A page with an image shows that requests do reach the proxy; the report with the same kind of image shows that its
    content security policy blocks them.
    """
    page = write_report([make_run(tmp_path / "a")], tmp_path / "r.html")
    Proxy.seen.clear()
    browse(page, tmp_path / "profile", proxy)
    assert [url for url in Proxy.seen if "google" not in url] == []
    (tmp_path / "asks.html").write_text('<script type="text/plain"></script><img src="http://example.com/seen.png">')
    browse(tmp_path / "asks.html", tmp_path / "profile2", proxy)
    assert "http://example.com/seen.png" in Proxy.seen
    (tmp_path / "asks.html").write_text(
        page.read_text().replace("<main>", '<main><img src="http://example.com/policy.png">')
    )
    browse(tmp_path / "asks.html", tmp_path / "profile3", proxy)
    assert "http://example.com/policy.png" not in Proxy.seen, "the report's content security policy must block requests"


def test_a_run_without_events_has_a_report_that_says_so(tmp_path, proxy):
    root = make_run(tmp_path / "a")
    (root / "events.jsonl").unlink()
    body, _ = browse(write_report([root], tmp_path / "r.html"), tmp_path / "profile", proxy)
    assert "No evaluation has been made yet." in body and "events.jsonl is not there yet" in body
    assert len(re.findall(r'class="plot js-plotly-plot"', body)) == 21


def test_samples_are_laid_out_when_they_are_opened(tmp_path, proxy):
    """Opened samples are plain text, whatever the model wrote; those of the second stage stay closed, in a template."""
    page = write_report([hostile_run(tmp_path / "run")], tmp_path / "r.html")
    opening = '<script>document.querySelector("details.samples").open = true</script></body>'
    page.write_text(page.read_text().replace("</body>", opening))
    Proxy.seen.clear()
    body, errors = browse(page, tmp_path / "profile", proxy)
    opened, closed = re.findall(r'<details class="samples".*?</details>', body, re.DOTALL)
    assert "CONSOLE" not in errors and closed.count("<template>") == 1
    assert set(re.findall(r"<(\w+)", opened)) == {"details", "summary", "h4", "pre"}
    assert html.unescape(opened).count(IMAGE) == 1 and "alert(2)" in opened
    assert [url for url in Proxy.seen if "example.com" in url] == []
