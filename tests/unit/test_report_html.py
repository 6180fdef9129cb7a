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
from tests.unit.report_fixtures import (
    HOSTILE_TEXTS,
    REPORTS,
    full_report,
    harm,
    hostile_report,
    null_ranks_report,
)

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

    def table(self, heading):
        """The cells of the first table after a heading, row by row."""
        start = next(at for at, element in enumerate(self.elements) if element["text"].strip() == heading)
        rows = []
        seen = False
        for element in self.elements[start:]:
            if element["tag"] == "table":
                if seen:
                    break
                seen = True
            if element["tag"] == "tr":
                rows.append([])
            elif element["tag"] in ("td", "th") and seen:
                rows[-1].append(" ".join(element["text"].split()))
        return rows

    @property
    def facts(self):
        """What the page's lists of facts say, by their names."""
        names = [" ".join(element["text"].split()) for element in self.all("dt")]
        values = [" ".join(element["text"].split()) for element in self.all("dd")]
        return dict(zip(names, values, strict=True))

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


def test_further_charts_stand_where_the_report_has_what_they_show():
    (embedded,) = page("detailed").all("script", type="application/json")
    theme = json.loads(embedded["text"])["dark"]
    assert set(theme) == {"similarity", "share", "histogram", "temperature", "sources"}
    cells = theme["sources"]["datasets"]["sources"]
    assert [cell["push_share"] for cell in cells] == [1 / 9] * 9
    assert len(page("detailed").all("svg")) == 5


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


def test_how_the_pairs_were_found_stands_above_them():
    said = full_report().pair_search.description
    assert f"The most similar negative pairs {said} Rank" in page("full").text


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
        "What to change",
        "How similar are negatives in general?",
        "Every figure, by batch size",
        "The most similar negative pairs",
        "The corpus",
        "The encoder",
        "How it was measured",
        "Warnings",
        "Five words to know",
        "This run",
    ]
    assert len(page("full").all("h1")) == 1
    detailed = [element["text"] for element in page("detailed").all("h2")]
    assert detailed == [
        *headings[:5],
        "Who brings the harm",
        "At another temperature",
        "What a larger batch costs and brings",
        *headings[5:],
    ]


def test_remedies_stand_in_a_table_with_what_they_do():
    # S(64) = .310 ± .004 + .02 / 64 of a labelled corpus: .3057 to .3143.
    rows = page("hostile").table("What to change")
    assert rows[0] == ["Change", "Batch size", "S before", "S after", "n_max after", "True push lost"]
    titles = [row[0].split(" ")[0] for row in rows[1:]]
    assert titles == ["Keep", "Never", "Drop", "Mask", "Train", "FlatNCE"]
    assert {tuple(row[1:3]) for row in rows[1:]} == {("64", "0.3100.306 to 0.314")}
    after = [row[3] for row in rows[1:]]
    assert after[0] == "0.2940.293 to 0.295"  # .310 × .95 ± .001
    assert after[1] == "00 to 0"
    assert after[3] == "0.155exact"
    assert re.fullmatch(r"—\d", after[5])
    assert [row[4] for row in rows[1:]][3] == "61"
    assert [row[5] for row in rows[1:]] == ["none", "none", "none", "0.013", "none", "none"]
    assert "11, 22, 33" in rows[3][0]


def test_code_to_paste_is_text_whatever_it_names():
    codes = [element["text"] for element in page("hostile").all("code")]
    column = "select_columns(['</script><script>alert(2)</script>'])"
    assert len([code for code in codes if column in code]) == 2
    assert f"train_dataset = rows.{column}\nargs = Arguments(batch_sampler=GroupAwareBatchSampler)" in codes
    assert "args = Arguments(per_device_train_batch_size=2)" in codes


def test_who_brings_the_harm_is_listed_by_source_and_by_row():
    text = page("detailed").text
    assert (
        "At N = 64 the share S is 0.030. Half of the push on same-meaning rows goes to 37 of 1,612 rows."
        in text
    )
    cells = page("detailed").table("Who brings the harm")
    assert cells[1] == ["chat", "chat", "0.0067", "0.1111", "0.060"]  # .02 / 3, 1 / 9, and their ratio
    assert cells[-1][2:] == ["0.0017", "0.1111", "0.015"]
    rows = page("detailed").table("Rows that the most of it goes to or comes from")
    assert rows[1][1:] == ["0.00060", "0.00040"]
    assert rows[3][0] == "no text was supplied" + "row 33 · chat"
    hostile = page("hostile").table("Rows that the most of it goes to or comes from")
    assert hostile[1][0].startswith(HOSTILE_TEXTS[1])


def test_one_source_has_no_table_of_sources():
    report = null_ranks_report().model_copy(update={"harm": harm(["a text"], ["only"])})
    single = Page(render_report_html(report))
    assert "Who brings the harm" in single.text
    assert "The cells as a table" not in single.text
    assert len(single.all("svg")) == 3
    assert single.table("Rows that the most of it goes to or comes from")[1] == [
        "a textrow 11",
        "0.00060",
        "0.00040",
    ]


def test_the_sampler_and_what_it_leaves_undone_are_said():
    facts = page("detailed").facts
    assert facts["Sampler"].startswith("no_duplicates: ")
    assert (
        facts["Devices"]
        == "2; the loss compares the rows of all; rows of one device: 8 at N = 16, 32 at N = 64, 128 at N = 256"
    )
    assert facts["Negatives of an anchor"] == "47 at N = 16, 191 at N = 64, 767 at N = 256"
    rows = page("detailed").table("What one epoch of the sampler leaves undone")
    assert rows[0] == [
        "Batch size", "rows left out", "of the rest that fills no batch", "rows that waited", "batches announced",
        "sources without a full batch",
    ]  # fmt: skip
    assert rows[3] == ["N = 256", "76", "76", "19", "6", "chat"]  # 1612 = 6 · 256 + 76
    assert "2 a device on 2 devices" in page("detailed").text
    assert "Not every integer was tested" in page("detailed").text


def test_chains_and_the_scenario_are_kept_apart_from_results():
    facts = page("detailed").facts
    assert "7,310 ordered pairs" in facts["Chains of known links"]
    assert "553 rows" in facts["Chains of known links"]
    assert "3, 14, 15, 92 … and 549 more" in facts["Chains of known links"]
    assert "a curve of STS-B scores" in facts["Scenario"]
    figures = {row[0]: row[1:] for row in page("detailed").table("Every figure, by batch size")}
    # S(64) = .0004 · 6, and .04 from chains.
    assert figures["The same with what chains of known links addinferred_share"][1] == "0.0420.038 to 0.046"
    # .0024 + .08 + 64 / 4000, without interval.
    assert re.fullmatch(r"0.098\d", figures["A scenario, no estimateborrowed_share"][1])


def test_hard_negatives_have_figures_of_their_own():
    figures = {row[0]: row[1:] for row in page("detailed").table("Every figure, by batch size")}
    assert figures["Share of the push on the row's ownhard_negatives.own_push"][0] == "0.1250.123 to 0.127"
    assert not [
        name for row in page("full").table("Every figure, by batch size") for name in row if "hard_" in name
    ]


def test_the_lower_end_of_the_window_is_said():
    facts = page("detailed").facts
    assert facts["Smallest batch"] == "32 rows; smaller batches starve"
    assert "float16 at T = 0.05" in facts["Holds for"]
    assert facts["What helps"] == "Compute the loss in float32. Use FlatNCE."


def test_repeated_rows_without_a_measured_effect_are_not_denied():
    assert (
        "19 rows repeat an earlier row, but what dropping them does was not measured."
        in page("detailed").text
    )
    assert "There are no repeated rows" not in page("detailed").text


def test_nothing_is_shown_of_what_a_report_does_not_have():
    text = page("full").text
    for words in (
        "Chains",
        "Scenario",
        "Code to paste\n",
        "one epoch of the sampler",
        "starve",
        "a device on",
        "Hard negatives",
    ):
        assert words not in text
    assert len(page("full").all("pre")) == 1  # of the repeated rows
    assert len(page("detailed").all("pre")) == 4


def test_header_cells_have_a_scope():
    assert all(element["attrs"].get("scope") for element in page("full").all("th"))


def test_the_same_report_gives_the_same_page():
    assert render_report_html(hostile_report()) == html("hostile")
