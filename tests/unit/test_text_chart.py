"""The terminal chart: figures in the right columns, and nothing that steers a terminal."""

from __future__ import annotations

import unicodedata

import pytest

from probe_service.text_chart import text_chart
from tests.unit.report_fixtures import (
    REPORTS,
    all_equal_report,
    certain_report,
    detailed_report,
    exactly,
    full_report,
    hostile_report,
    null_ranks_report,
)


def plot(line: str, edge: str = "│") -> str:
    return line.split(edge)[1]


def share_line(text: str, size: int) -> str:
    share = text[text.index("S(N)") :]
    return next(line for line in share.splitlines() if line.split()[:1] == [str(size)])


def test_the_dot_stands_where_the_value_is():
    line = share_line(text_chart(full_report(), width=80), 256)
    cells = plot(line)
    # 80 columns: 34 for figures, 2 edges, so 44 cells; S(256) = .540 falls on cell .540 × 43 = 23.2.
    assert len(cells) == 44
    assert cells.index("●") == 23
    assert cells.index("┆") == 9  # the budget .20 × 43 = 8.6
    assert "0.540" in line
    assert "0.536 to 0.544" in line


def test_the_share_of_one_is_at_the_right_edge():
    assert plot(share_line(text_chart(all_equal_report()), 32)).endswith("●")


def test_worst_case_fills_the_unknown():
    cells = plot(share_line(text_chart(certain_report(), width=136), 16))
    assert len(cells) == 100
    # From S = .0016 to the upper limit .334 of the worst case, less the budget's column: .334 × 99 = 33.07.
    assert cells.rindex("░") == 33
    assert cells.count("░") == 32
    assert cells[0] == "●"
    assert cells[20] == "┆"


def test_missing_rank_says_why():
    text = text_chart(null_ranks_report())
    assert "(fewer than 4 negative pairs)" in text


def test_no_interval_is_said():
    assert "no interval" in share_line(text_chart(null_ranks_report()), 64)


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [20, 48, 80, 140])
def test_no_line_is_longer_than_the_terminal(name, width):
    for line in text_chart(REPORTS[name](), width=width).splitlines():
        assert len(line) <= max(width, 48)


@pytest.mark.parametrize("name", REPORTS)
def test_ascii_only(name):
    assert text_chart(REPORTS[name](), ascii_only=True).isascii()


@pytest.mark.parametrize("use_colour", [False, True])
def test_texts_cannot_steer_the_terminal(use_colour):
    report = hostile_report()
    evil = "\x1b[2J\x9b1m\u202e\r\x07\x00"
    advice = report.advice.model_copy(
        update={
            "verdicts": [
                verdict.model_copy(update={"reason": evil, "assumption": evil})
                for verdict in report.advice.verdicts
            ],
            "n_max": report.advice.n_max.model_copy(update={"reason": evil, "assumption": evil}),
            "headline": evil,
        }
    )
    text = text_chart(report.model_copy(update={"advice": advice}), use_colour=use_colour)
    if use_colour:
        for ours in ("\x1b[1;31m", "\x1b[1;32m", "\x1b[0m"):
            assert ours in text
            text = text.replace(ours, "")
    assert [c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"] == []


def test_verdicts_are_listed():
    lines = text_chart(full_report()).splitlines()
    assert any(line.split()[:2] == ["16", "PASS"] for line in lines)
    assert any(line.split()[:2] == ["1024", "FAIL"] for line in lines)
    assert any("n_max): 27" in line for line in lines)


def test_what_helps_most_is_listed():
    # S(64) = .310 ± .004 + .02 / 64 before; 0, half of .310, .310 · .8, .310 · .9 + .0012, .310 · .95 + .001 after.
    lines = text_chart(hostile_report()).splitlines()
    start = lines.index("What helps most, and the upper limit of S at 64 rows before and after")
    assert lines[start + 1 :] == [
        "   0.314 → 0.000  Never put two rows of one group into a batch",
        "   0.314 → 0.155  Mask candidates of similarity 0.9 or more",
        "   0.314 → 0.248  Train at a temperature of 0.108",
    ]
    report = hostile_report()
    nothing = [each for each in report.advice.remedies if each.share_after is None]
    worse = [each.model_copy(update={"share_after": each.share_before}) for each in report.advice.remedies]
    for remedies in (nothing, worse):
        advice = report.advice.model_copy(update={"remedies": remedies})
        assert "What helps" not in text_chart(report.model_copy(update={"advice": advice}))


def test_the_best_of_each_kind_is_listed():
    report = hostile_report()
    *_, mask = (each for each in report.advice.remedies if each.kind == "mask")
    stronger = mask.model_copy(update={"title": "Mask more", "share_after": exactly(0.1)})
    advice = report.advice.model_copy(update={"remedies": [mask, stronger]})
    lines = text_chart(report.model_copy(update={"advice": advice})).splitlines()
    assert lines[-1] == "   0.314 → 0.100  Mask more"
    assert "→" not in lines[-2]


def test_devices_and_sampler_are_named_where_they_matter():
    text = " ".join(text_chart(detailed_report()).split())
    assert "temperature 0.05 · sampler no_duplicates" in text
    assert "(n_max): 4, 2 a device on 2 devices." in text
    assert "Not every integer was tested" in text
    plain = text_chart(full_report())
    assert "sampler" not in plain
    assert "device" not in plain
    assert "integer" not in plain


def test_a_running_job_has_one_size_or_none():
    report = full_report()
    text = text_chart(report.curve[:1])
    assert plot(share_line(text, 16)).count("●") == 1
    assert "Verdict" not in text
    assert text_chart([]) == "Nothing has been measured yet.\n"
