"""The report in a real browser: its charts are drawn, its tables have the right numbers, and it makes no request."""

import html
import http.server
import os
import re
import shutil
import subprocess
import threading
from typing import ClassVar

import pytest

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


def browse(page, profile, proxy):
    """(the document after its scripts have run, without the scripts; what the browser logged)."""
    assert BROWSER, "MEGARL_REQUIRE_BROWSER=1, but there is no chromium"
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={profile}"]
    command += [f"--proxy-server={proxy}", "--virtual-time-budget=10000", "--window-size=1400,3000"]
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
    for number in ("0.281 ± 0.028", "0.902 ± 0.018", "+0.621 ± 0.033", "288 / 288", "288,000", "1 min 40 s"):
        assert f"<td>{number}</td>" in body, number


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
