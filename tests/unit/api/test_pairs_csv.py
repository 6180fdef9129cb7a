"""The table of pairs as csv, opened by a spreadsheet."""

from __future__ import annotations

import csv
import io

from probe_service.api.probes import _csv_rows
from probe_service.schemas import SimilarPair


def test_texts_that_look_like_formulas_stay_texts(tmp_path):
    pair = SimilarPair(
        rank=1,
        similarity=-0.5,
        row=3,
        other_row=9,
        text='=HYPERLINK("http://evil.test")',
        other_text="-2+3, plain",
        known_false_negative=None,
        source=None,
        other_source="@sum",
    )
    file = tmp_path / "pairs.jsonl"
    file.write_text(pair.model_dump_json() + "\n")
    (row,) = csv.DictReader(io.StringIO("".join(_csv_rows(file))))
    assert row["text"] == '\'=HYPERLINK("http://evil.test")'
    assert row["other_text"] == "'-2+3, plain"
    assert row["other_source"] == "'@sum"
    # Numbers stay numbers, also below zero.
    assert row["similarity"] == "-0.5"
