"""The HTML report as a parser sees it: its policy, its texts, its figures, and a reason at every dash."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from html.parser import HTMLParser

import pytest

from probe_service.report_html import render_report_html
from tests.unit.report_fixtures import HOSTILE_TEXTS, REPORTS, full_report, hostile_report

VOID = {"meta", "wbr", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements in order, each with its attributes and the text directly and indirectly inside."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[dict] = []
        self._open: list[dict] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "attrs": dict(attrs), "text": ""}
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append({"tag": tag, "attrs": dict(attrs), "text": ""})

    def handle_endtag(self, tag):
        assert self._open.pop()["tag"] == tag

    def handle_data(self, text):
        for element in self._open:
            element["text"] += text

    def all(self, tag, **attrs):
        return [
            element
            for element in self.elements
            if element["tag"] == tag
            and all(element["attrs"].get(key) == value for key, value in attrs.items())
        ]

    @property
    def text(self):
        return " ".join(self.all("body")[0]["text"].split())


@cache
def html(name):
    return render_report_html(REPORTS[name]())


@cache
def page(name):
    return Page(html(name))


def digest(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("name", REPORTS)
def test_policy_allows_exactly_what_is_inside(name):
    (meta,) = page(name).all("meta", **{"http-equiv": "Content-Security-Policy"})
    policy = dict(rule.split(" ", 1) for rule in meta["attrs"]["content"].split("; "))
    assert policy["default-src"] == "'none'"
    scripts = [element for element in page(name).all("script") if "type" not in element["attrs"]]
    styles = page(name).all("style")
    assert policy["script-src"].split() == [digest(element["text"]) for element in scripts]
    assert policy["style-src"].split() == [digest(element["text"]) for element in styles]
    assert "unsafe" not in meta["attrs"]["content"]


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_loaded_and_nothing_is_inline(name):
    for element in page(name).elements:
        assert element["tag"] not in ("img", "link", "iframe", "object", "embed", "base", "form")
        assert not {"src", "style", "srcset", "data", "action"} & element["attrs"].keys()
        assert not [key for key in element["attrs"] if key.startswith("on")]
        assert element["attrs"].get("href", "#").startswith("#")


def test_hostile_texts_appear_as_text():
    text = page("hostile").text
    for hostile in HOSTILE_TEXTS[:2]:
        assert hostile in text
    assert "<b>bold</b>" in text
    assert "{{ 7 * 7 }}" in text
    assert len(page("hostile").all("script")) == 3
    assert len(page("hostile").all("title")) == 1
    assert not any(character in html("hostile") for character in "\u202e\x1b\x07\x00")


def test_long_texts_are_folded_but_whole():
    folded = [element for element in page("hostile").all("details") if "5,000 characters" in element["text"]]
    assert folded
    assert folded[0]["text"].count("long ") >= 1000


def test_charts_inside_are_the_reports():
    (embedded,) = page("full").all("script", type="application/json")
    specs = json.loads(embedded["text"])
    report = full_report()
    assert set(specs) == {"light", "dark"}
    for theme in specs.values():
        assert set(theme) == {"similarity", "share", "histogram"}
        means = [
            row for row in theme["similarity"]["datasets"]["similarity"] if row["series"] == "top_k_mean"
        ]
        assert [(row["batch_size"], row["value"]) for row in means] == [
            (point.batch_size, point.top_k_mean.value) for point in report.curve
        ]
    assert specs["light"]["share"]["config"]["background"] != specs["dark"]["share"]["config"]["background"]
    assert len(page("full").all("svg")) == 3
    assert len([div for div in page("full").all("div", role="img") if div["attrs"]["aria-label"]]) == 3


@pytest.mark.parametrize("name", REPORTS)
def test_a_badge_says_each_verdict(name):
    report = REPORTS[name]()
    items = [" ".join(item["text"].split()) for item in page(name).all("li")]
    for verdict in report.advice.verdicts:
        symbol = {"pass": "✓", "fail": "✕", "inconclusive": "?"}[verdict.verdict.value]
        start = f"N = {verdict.batch_size}{symbol} {verdict.verdict.value}"
        assert any(item.startswith(start) for item in items)


@pytest.mark.parametrize("name", REPORTS)
def test_every_dash_has_a_note_that_exists(name):
    notes = {element["attrs"]["id"] for element in page(name).all("li") if "id" in element["attrs"]}
    cells = [element["text"] for element in page(name).all("td", **{"class": "number"})]
    for cell in cells:
        assert re.fullmatch(r"—\d+|[^—]+", cell), cell
    links = {element["attrs"]["href"][1:] for element in page(name).all("a")}
    assert links <= notes
    assert len(links) == len(notes)


def test_figures_stand_in_the_table_with_their_interval():
    cells = [element["text"] for element in page("full").all("td", **{"class": "number"})]
    # S(256) = .540 ± .004 + .02/256; false negatives per anchor .0137 × 1023.
    assert "0.5400.536 to 0.544" in cells
    assert any(cell.startswith("14.0") for cell in cells)
    assert any(cell.startswith("2.0·10⁻⁷") for cell in cells)


def test_null_ranks_and_missing_intervals_are_explained():
    text = page("null_ranks").text
    assert "fewer negative pairs than the rank asks for (top k = 4)" in text
    assert "no interval: N is above a 20th of the encoded rows" in text
    assert "no positives whose similarity could be measured" in text


def test_incomplete_evidence_is_said():
    text = page("certain").text
    assert "more than 0.999 of all pairs" in text  # .99998 is not 1
    assert "No pair with a similarity below 0.47 means the same." in text
    assert "38 of 2,596,932 ordered pairs" in text


def test_no_safe_size_is_said():
    (figure,) = page("all_equal").all("span", **{"class": "figure"})
    assert figure["text"] == "none"


def test_excluded_rows_are_listed_by_number():
    text = page("full").text
    assert "5 rows are blank." in text
    assert "12, 77, 301, 302, 900" in text
    assert "and 13 more" in text  # 19 repeated rows, 6 of them listed


def test_sections_follow_the_order_of_questions():
    headings = [element["text"] for element in page("full").all("h2")]
    assert headings == [
        "Verdict by batch size",
        "How sure is this?",
        "How similar are the hardest negatives?",
        "How much of the push hits rows that mean the same?",
        "How similar are negatives in general?",
        "Every figure, by batch size",
        "What to change",
        "The most similar negative pairs",
        "The corpus",
        "The encoder",
        "How it was measured",
        "Warnings",
        "Five words to know",
        "This run",
    ]
    assert len(page("full").all("h1")) == 1


def test_header_cells_have_a_scope():
    assert all(element["attrs"].get("scope") for element in page("full").all("th"))


def test_the_same_report_gives_the_same_page():
    assert render_report_html(hostile_report()) == html("hostile")
