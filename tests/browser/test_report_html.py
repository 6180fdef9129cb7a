"""The report opened from disk in Chromium without a network, light and dark, wide and narrow, with and without scripts."""

from __future__ import annotations

import pytest

from probe_service.report_html import render_report_html
from tests.unit.report_fixtures import REPORTS

CHARTS = ("similarity", "share", "histogram")
WITH_DETAILS = {"detailed", "hostile"}


def charts_of(name):
    return (*CHARTS, "sources", "temperature") if name in WITH_DETAILS else CHARTS


WHITE, NEAR_BLACK = "rgb(255, 255, 255)", "rgb(20, 24, 29)"


def background(page, selector):
    return page.locator(selector).evaluate("element => getComputedStyle(element).backgroundColor")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for name, make in REPORTS.items():
        (folder / f"{name}.html").write_text(render_report_html(make()), encoding="utf-8")
    return folder


class Tab:
    """A page without network that notes everything that it should not do."""

    def __init__(self, chromium, path, **options):
        self.context = chromium.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.faults = []
        self.page.on("console", lambda note: self.faults.append(f"{note.type}: {note.text}"))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.faults.append("dialog"), dialog.dismiss()))
        self.page.on("request", self._request)
        self.url = path.as_uri()
        self.page.goto(self.url)

    def _request(self, request):
        if request.url != self.url:
            self.faults.append(f"request: {request.url}")

    def wait_until_drawn(self, scheme=None):
        # By selector: waiting for an expression would evaluate a string, which the page's policy forbids.
        named = f"html[data-charts={scheme}]" if scheme else "html[data-charts]"
        self.page.wait_for_selector(named, state="attached", timeout=60_000)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.context.close()


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_are_drawn_and_nothing_else_happens(chromium, files, name, scheme):
    with Tab(chromium, files / f"{name}.html", color_scheme=scheme) as tab:
        tab.wait_until_drawn(scheme)
        assert tab.page.locator(".chart-live svg").count() == len(charts_of(name))
        for chart in charts_of(name):
            svg = tab.page.locator(f"#chart-{chart} .chart-live svg")
            assert svg.is_visible()
            assert svg.locator("path").count() >= 5
            assert tab.page.locator(f"#chart-{chart} .chart-static").is_hidden()
        painted = background(tab.page, "#chart-share .chart-live svg")
        assert painted == background(tab.page, "body") == {"light": WHITE, "dark": NEAR_BLACK}[scheme]
        assert tab.faults == []


def test_hostile_texts_do_not_run_and_are_read(chromium, files):
    with Tab(chromium, files / "hostile.html") as tab:
        tab.wait_until_drawn()
        assert tab.page.evaluate("window.__hacked") is None
        assert "<script>window.__hacked = true; alert(1)</script>" in tab.page.inner_text("#pairs ~ table")
        assert tab.page.inner_text("h1").startswith("</script><script>alert(3)</script> is safe")
        assert tab.faults == []


@pytest.mark.parametrize(("name", "width"), [*((name, 360) for name in REPORTS), ("full", 1600)])
def test_the_page_fits_its_window(chromium, files, name, width):
    with Tab(chromium, files / f"{name}.html", viewport={"width": width, "height": 800}) as tab:
        tab.wait_until_drawn()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        for chart in charts_of(name):
            box = tab.page.locator(f"#chart-{chart} .chart-live svg").bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
            cut = tab.page.evaluate(
                """name => {
                  const svg = document.querySelector(`#chart-${name} .chart-live svg`);
                  const edge = svg.getBoundingClientRect();
                  return [...svg.querySelectorAll("text")].filter((text) => {
                    const box = text.getBoundingClientRect();
                    return box.width && (box.right > edge.right + 1 || box.left < edge.left - 1
                      || box.top < edge.top - 1 || box.bottom > edge.bottom + 1);
                  }).map((text) => text.textContent);
                }""",
                chart,
            )
            assert cut == []


def test_charts_follow_the_colour_scheme(chromium, files):
    with Tab(chromium, files / "full.html", color_scheme="light") as tab:
        tab.wait_until_drawn("light")
        tab.page.emulate_media(color_scheme="dark")
        tab.wait_until_drawn("dark")
        assert background(tab.page, "#chart-share .chart-live svg") == NEAR_BLACK
        assert tab.page.locator(".chart-live svg").count() == 3
        assert tab.faults == []


def test_a_point_shows_its_figures(chromium, files):
    with Tab(chromium, files / "single.html") as tab:
        tab.wait_until_drawn()
        points = tab.page.locator("#chart-share .chart-live .mark-symbol path")
        points.first.scroll_into_view_if_needed()
        points.first.hover()
        tooltip = tab.page.locator("#vg-tooltip-element")
        tooltip.wait_for(state="visible")
        assert "0.3100" in tooltip.inner_text()
        assert tab.faults == []


def test_code_is_copied_as_it_stands(chromium, files):
    permissions = ["clipboard-read", "clipboard-write"]
    with Tab(chromium, files / "hostile.html", permissions=permissions) as tab:
        tab.wait_until_drawn()
        code = tab.page.locator("details.code", has_text="NO_DUPLICATES")
        code.locator("summary").click()
        code.get_by_role("button", name="Copy").click()
        code.get_by_role("button", name="Copied").wait_for()
        assert tab.page.evaluate("navigator.clipboard.readText()") == (
            "train_dataset = rows.select_columns(['</script><script>alert(2)</script>'])\n"
            "args = Arguments(batch_sampler=BatchSamplers.NO_DUPLICATES)"
        )
        assert tab.faults == []


def test_without_scripts_the_static_charts_stand(chromium, files):
    with Tab(chromium, files / "full.html", java_script_enabled=False) as tab:
        assert tab.page.locator(".chart-static").count() == 3
        for chart in CHARTS:
            assert tab.page.locator(f"#chart-{chart} .chart-static svg").is_visible()


def test_paper_gets_the_static_charts(chromium, files):
    with Tab(chromium, files / "full.html", color_scheme="dark") as tab:
        tab.wait_until_drawn()
        tab.page.emulate_media(media="print", color_scheme="dark")
        for chart in CHARTS:
            assert tab.page.locator(f"#chart-{chart} .chart-static svg").is_visible()
            assert tab.page.locator(f"#chart-{chart} .chart-live").is_hidden()
        assert background(tab.page, "body") == WHITE
