"""The report in a real browser: it fits a phone, the search filters, and the only script runs under the page's policy.

A second page loads the report in a frame as wide as a phone, uses it, and writes what it saw into itself; the browser
prints that page.
"""

from __future__ import annotations

import html
import json
import re
import shutil

import pytest

from helmscope.claims.reading import read_catalogue
from helmscope.claims.trial import run_trial
from helmscope.report.page import page
from support.children import run_child

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--virtual-time-budget=20000")
HARNESS = """<!DOCTYPE html>
<iframe src="report.html" style="width: 390px; height: 800px; border: 0"></iframe><pre></pre>
<script>
window.onload = () => {
  const page = document.querySelector("iframe").contentDocument;
  const use = (id, change, event) => {
    change(page.getElementById(id));
    page.getElementById(id).dispatchEvent(new Event(event, { bubbles: true }));
    const seen = [...page.querySelectorAll("article, .board tbody tr")].filter((part) => part.getClientRects().length);
    return [seen.length, page.getElementById("shown").textContent];
  };
  const image = page.querySelector("img");
  const seen = {
    beyond: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    start: page.getElementById("shown").textContent,
    picture: [image.naturalWidth, image.currentSrc === page.querySelector("source").srcset],
    search: use("search", (box) => { box.value = "KURAMOTO circle"; }, "input"),
    nothing: use("search", (box) => { box.value = "<b>"; }, "input"),
    all: use("search", (box) => { box.value = ""; }, "input"),
    ruling: use("show-construction", (box) => { box.click(); }, "change"),
  };
  document.querySelector("pre").textContent = JSON.stringify(seen);
};
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
def test_the_report_fits_a_phone_and_its_search_and_filter_work(tmp_path):
    catalogue = read_catalogue()
    (tmp_path / "report.html").write_text(page(catalogue, [run_trial("kuramoto", quick=True)]), encoding="utf-8")
    (tmp_path / "harness.html").write_text(HARNESS, encoding="utf-8")
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"file://{tmp_path}/harness.html",
    ]
    printed = run_child(command, check=True).stdout
    seen = json.loads(html.unescape(re.search(r"<pre>(.*?)</pre>", printed, re.DOTALL).group(1)))
    assert seen["beyond"] == 0
    assert seen["start"] == f"{len(catalogue)} of {len(catalogue)} claims shown"
    assert seen["picture"] == [374, True]  # the narrow one, 3.9 inches of 96 pixels
    assert seen["search"] == [2, f"1 of {len(catalogue)} claims shown"]  # its row of the board and its card
    assert seen["nothing"] == [0, f"0 of {len(catalogue)} claims shown"]
    assert seen["all"][0] == len(catalogue) + 1
    assert seen["ruling"] == [2, f"1 of {len(catalogue)} claims shown"]
