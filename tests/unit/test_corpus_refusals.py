"""Every refusal: its code, the first bad row, the count; and the same from the first 64 KiB where it shows there."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from probe_service.corpus import read_corpus, sniff_corpus
from probe_service.errors import CorpusError
from probe_service.schemas import CorpusFormat, CorpusOptions
from tests.unit.corpus_files import REFUSED_ROW_BYTES, jsonl, options, read, refused, write

GOOD = [{"text": f"text {i}"} for i in range(2000)]
NOISE = np.random.default_rng(7).bytes(40_000)


def npy(array: np.ndarray, *, pickled: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=pickled)
    return buffer.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def parquet(columns: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def lines(*, bad: dict[int, bytes], count: int = 1500) -> bytes:
    """Good jsonl lines, numbered from 1, but for the bad ones."""
    return b"\n".join(bad.get(i, b'{"text": "text %d"}' % i) for i in range(1, count + 1)) + b"\n"


OBJECTS = np.array([{"a": 1}, None], dtype=object)
LONG = b'{"text": "' + b"x" * 2 * REFUSED_ROW_BYTES + b'"}'

STRING_VECTORS = jsonl({"embedding": [1, 2]}, {"embedding": ["a", "b"]}, {"embedding": "c"})

# what, name, content, code, first bad row, count of bad rows
REFUSALS: list[tuple[str, str, bytes, str, int | None, int | None]] = [
    ("empty file", "a.jsonl", b"", "corpus_empty", None, None),
    ("empty gzip", "a.txt.gz", b"", "corpus_empty", None, None),
    ("only a header", "a.csv", b"text,group\n", "corpus_empty", None, None),
    ("only a byte order mark", "a.txt", b"\xef\xbb\xbf", "corpus_empty", None, None),
    ("no rows in parquet", "a.parquet", parquet({"text": pa.array([], pa.string())}), "corpus_empty", None, None),
    ("no rows in npy", "a.npy", npy(np.empty((0, 3))), "corpus_empty", None, None),
    ("only blank lines", "a.txt", b"\n \n\n", "corpus_no_usable_rows", 1, 3),
    ("only blank json lines", "a.jsonl", b"\n\n", "corpus_no_usable_rows", 1, 2),
    ("only nulls", "a.jsonl", jsonl({"text": None}, {"text": 3}), "corpus_no_usable_rows", 1, 2),
    ("one usable row", "a.jsonl", jsonl({"text": "a"}, {"text": ""}, {"text": None}), "corpus_too_few_rows", 2, 2),
    ("one row", "a.txt", b"one", "corpus_too_few_rows", None, 0),
    ("one usable vector", "a.npy", npy(np.array([[0.0, 0.0], [1.0, 0.0]])), "corpus_too_few_rows", 1, 1),
    ("no known column", "a.csv", b"foo,bar\n1,2\n3,4\n", "corpus_column_missing", None, None),
    ("no header", "a.csv", b"How do I reset it?\nWhere is it?\n", "corpus_column_missing", None, None),
    ("semicolons", "a.csv", b"text;group\na;1\nb;2\n", "corpus_column_missing", None, None),
    ("no positive", "a.csv", b"anchor,negative\na,b\nc,d\n", "corpus_column_missing", None, None),
    ("two anchors", "a.csv", b"query,question,answer\na,b,c\nd,e,f\n", "corpus_roles_ambiguous", None, None),
    ("two texts", "a.csv", b"text,query\na,b\nc,d\n", "corpus_roles_ambiguous", None, None),
    ("a column twice", "a.csv", b"text,text\na,b\nc,d\n", "corpus_roles_ambiguous", None, None),
    ("judged pairs", "a.tsv", b"sentence1\tsentence2\tlabel\na\tb\t1\nc\td\t0\n", "corpus_roles_ambiguous", None, None),
    ("scored pairs", "a.csv", b"sentence1,sentence2,score\na,b,4.5\nc,d,1.0\n", "corpus_roles_ambiguous", None, None),
    ("binary junk", "a.jsonl", NOISE, "corpus_not_text", 1, None),
    ("broken line 1,001", "a.jsonl", lines(bad={1001: b'{"text": "x'}), "corpus_bad_line", 1001, 1),
    ("three broken lines", "a.jsonl", lines(bad=dict.fromkeys((7, 8, 1400), b"{]")), "corpus_bad_line", 7, 3),
    ("all lines broken", "a.jsonl", b"{]\n{]\n", "corpus_bad_line", 1, 2),
    ("a number", "a.jsonl", lines(bad={3: b"5"}), "corpus_bad_line", 3, 1),
    ("lists", "a.jsonl", b'["a"]\n["b"]\n', "corpus_bad_line", 1, 2),
    ("deep nesting", "a.jsonl", lines(bad={2: b"[" * 3000}), "corpus_bad_line", 2, 1),
    ("two objects on a line", "a.jsonl", lines(bad={2: b'{"text": "a"} {"text": "b"}'}), "corpus_bad_line", 2, 1),
    ("too many fields", "a.csv", b"text,group\na,1\nb,c,2\nd,3\ne\n", "corpus_bad_line", 2, 2),
    ("too few tabs", "a.tsv", b"text\tgroup\na\t1\nb\n", "corpus_bad_line", 2, 1),
    ("an open quote", "a.csv", b'text,group\na,1\n"b,2\nc,3\n', "corpus_bad_line", 2, 1),
    ("text after a quote", "a.csv", b'text,group\n"a"b,1\nc,2\n"d"e,3\n', "corpus_bad_line", 1, 2),
    ("NUL in jsonl", "a.jsonl", lines(bad={5: b'{"text": "a\0b"}', 9: b"\0"}), "corpus_nul_bytes", 5, 2),
    ("escaped NUL", "a.jsonl", lines(bad={5: b'{"text": "a\\u0000b"}'}), "corpus_nul_bytes", 5, 1),
    ("NUL in txt", "a.txt", b"one\ntwo\0\nthree\n", "corpus_nul_bytes", 2, 1),
    ("NUL in csv", "a.csv", b"text,id\na,1\nb\0,2\n\0,3\n", "corpus_nul_bytes", 2, 2),
    ("NUL in tsv", "a.tsv", b"text\tid\na\t1\nb\0\t2\n", "corpus_nul_bytes", 2, 1),
    ("Latin-1 in jsonl", "a.jsonl", lines(bad={4: b'{"text": "gr\xfc\xdf"}'}), "corpus_invalid_utf8", 4, 1),
    ("Latin-1 in txt", "a.txt", "grün\nblau\nweiß\n".encode("latin-1"), "corpus_invalid_utf8", 1, 2),
    ("Latin-1 in csv", "a.csv", "text,id\nblau,1\ngrün,2\n".encode("latin-1"), "corpus_invalid_utf8", 2, 1),
    ("Latin-1 in a csv header", "a.csv", "text,größe\nblau,1\ngrau,2\n".encode("latin-1"), "corpus_invalid_utf8", 1, 1),
    ("a csv header that is not text", "a.csv", b"\xff\xfc\na\nb\n", "corpus_invalid_utf8", 1, 1),
    ("a blank csv header", "a.csv", b"\ntext\na\nb\n", "corpus_column_missing", None, None),
    ("a blank tsv header", "a.tsv", b"\na\nb\n", "corpus_column_missing", None, None),
    ("UTF-16", "a.txt", "one\ntwo\n".encode("utf-16"), "corpus_invalid_utf8", 1, None),
    ("half a surrogate pair", "a.jsonl", lines(bad={6: b'{"text": "a\\ud800"}'}), "corpus_invalid_utf8", 6, 1),
    ("a long row in jsonl", "a.jsonl", lines(bad={3: LONG, 5: LONG}), "corpus_row_too_large", 3, 2),
    ("a long row in txt", "a.txt", b"one\n" + b"x" * 5000 + b"\ntwo\n", "corpus_row_too_large", 2, 1),
    ("a long record of csv", "a.csv", b'text,id\na,1\n"' + b"line\n" * 1000 + b'",2\n', "corpus_row_too_large", 2, None),
    ("a long line of tsv", "a.tsv", b"text\tid\na\t1\n" + b"x" * 5000 + b"\t2\n", "corpus_row_too_large", 2, 1),
    ("a long text in parquet", "a.parquet", parquet({"text": ["a", "x" * 5000, "c"]}), "corpus_row_too_large", 2, 1),
    ("unknown suffix", "a.xlsm", b"some text\n", "corpus_format_unknown", None, None),
    ("JSON array", "a.json", json.dumps(GOOD[:5], indent=1).encode(), "corpus_format_unknown", None, None),
    ("JSON array on a line", "a.json", json.dumps(GOOD[:5]).encode(), "corpus_format_unknown", None, None),
    ("zstd", "a.jsonl", b"\x28\xb5\x2f\xfd1234", "corpus_format_unknown", None, None),
    ("a zip without arrays", "a.zip", npz(a=np.eye(2)).replace(b".npy", b".txt"), "corpus_format_unknown", None, None),
    ("not parquet", "a.parquet", b"text\n" * 9, "corpus_parquet_damaged", None, None),
    ("cut parquet", "a.parquet", parquet({"text": ["a", "b"]})[:-20], "corpus_parquet_damaged", None, None),
    ("cut gzip", "a.jsonl", gzip.compress(lines(bad={}))[:-500], "corpus_gzip_damaged", None, None),
    ("damaged gzip", "a.jsonl", gzip.compress(b"x")[:10] + NOISE[:100], "corpus_gzip_damaged", None, None),
    ("pickled npy", "a.npy", npy(OBJECTS, pickled=True), "embeddings_pickled", None, None),
    ("pickled npz", "a.npz", npz(embeddings=OBJECTS), "embeddings_pickled", None, None),
    ("texts as vectors", "a.npy", npy(np.array([["a", "b"], ["c", "d"]])), "embeddings_not_numeric", None, None),
    ("complex vectors", "a.npy", npy(np.eye(2) * 1j), "embeddings_not_numeric", None, None),
    ("one axis", "a.npy", npy(np.arange(5.0)), "embeddings_not_numeric", None, None),
    ("cut npy", "a.npy", npy(np.eye(9))[:-8], "embeddings_damaged", None, None),
    ("unequal lengths", "a.npz", npz(embeddings=np.eye(2), id=np.arange(3)), "embeddings_widths_differ", None, None),
    ("widths", "a.parquet", parquet({"embeddings": [[1.0, 2], [1, 2, 3], [3, 4], [5]]}), "embeddings_widths_differ", 2, 2),
    ("strings", "a.jsonl", STRING_VECTORS, "embeddings_not_numeric", 2, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "code", "row", "count"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS]
)
def test_refused(
    tmp_path: Path, name: str, content: bytes, code: str, row: int | None, count: int | None
) -> None:
    path = write(tmp_path, name, content)
    error = refused(path, code)
    assert error.row == row
    if count is not None:
        assert error.count == count
    with pytest.raises(CorpusError) as caught:
        sniff_corpus(path.read_bytes(), name, CorpusOptions(), complete=True, max_row_bytes=REFUSED_ROW_BYTES)
    assert (caught.value.code, caught.value.row, caught.value.count) == (code, row, error.count)


def test_the_first_fault_by_row_is_raised_with_the_count_of_its_own_kind(tmp_path: Path) -> None:
    bad = {40: b"{]", 30: b'{"text": "\xff"}', 50: b"{]", 60: b'{"text": "\xff"}', 70: b"\xff"}
    error = refused(write(tmp_path, "a.jsonl", lines(bad=bad)), "corpus_invalid_utf8")
    assert (error.row, error.count) == (30, 3)


def test_faults_beyond_the_first_chunk_are_found_and_counted(tmp_path: Path) -> None:
    bad = {60_000: b"{]", 60_001: b"{]"}
    path = write(tmp_path, "a.jsonl", lines(bad=bad, count=70_000))
    assert path.stat().st_size > 2 * 512 * 1024
    error = refused(path, "corpus_bad_line")
    assert (error.row, error.count) == (60_000, 2)
    assert (
        sniff_corpus(path.read_bytes()[:65536], path.name, CorpusOptions(), complete=False)
        is CorpusFormat.JSONL
    )


def test_a_ten_megabyte_row_is_refused_at_the_default_limit(tmp_path: Path) -> None:
    long = b'{"text": "' + b"x" * 10_000_000 + b'"}'
    path = write(tmp_path, "a.jsonl", lines(bad={3: long}, count=5))
    with pytest.raises(CorpusError) as caught:
        read_corpus(path, options(), sample_size=10, rng=np.random.default_rng(0))
    assert (caught.value.code, caught.value.row, caught.value.count) == ("corpus_row_too_large", 3, 1)


def test_a_number_with_thousands_of_digits_neither_crashes_nor_hangs(tmp_path: Path) -> None:
    content = lines(bad={2: b'{"text": "b", "n": ' + b"9" * 3900 + b"}"}, count=3)
    assert read(write(tmp_path, "a.jsonl", content)).anchors == ["text 1", "b", "text 3"]


@pytest.mark.parametrize(
    ("columns", "fields", "column"),
    [
        ({"text": "body"}, {}, "body"),
        ({"group": "topic"}, {}, "topic"),
        ({"anchor": "text", "positive": "other"}, {}, "other"),
        ({"negatives": ("neg",)}, {}, "neg"),
        ({}, {"where": {"split": "train"}}, "split"),
        ({}, {"label_is_meaning": True}, "label"),
        ({}, {"kind": "pairs"}, "positive"),
        ({}, {"kind": "embeddings"}, "embedding"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_column_that_is_asked_for_and_missing(
    tmp_path: Path, name: str, columns: dict[str, Any], fields: dict[str, Any], column: str
) -> None:
    content = {
        "a.jsonl": jsonl({"text": "a", "id": 1}, {"text": "b", "id": 2}),
        "a.csv": b"text,id\na,1\nb,2\n",
        "a.parquet": parquet({"text": ["a", "b"], "id": [1, 2]}),
    }[name]
    error = refused(write(tmp_path, name, content), "corpus_column_missing", columns, **fields)
    assert error.column == column
    assert "'text'" in error.message
    assert "'id'" in error.message or "kind" in fields


def test_a_row_filter_that_keeps_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", jsonl({"text": "a", "s": "x"}, {"text": "b", "s": "y"}))
    error = refused(path, "corpus_no_usable_rows", where={"s": "z"})
    assert "2 set aside by where" in error.message


def test_invalid_utf8_inside_parquet(tmp_path: Path) -> None:
    binary = pa.array([b"ok", b"gr\xfcn", b"ok too", b"\xff"], pa.binary())
    text = pa.StringArray.from_buffers(4, *binary.buffers()[1:])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    error = refused(tmp_path / "a.parquet", "corpus_invalid_utf8")
    assert (error.row, error.count) == (2, 2)


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "nothing.txt", "corpus_unreadable")
    refused(tmp_path, "corpus_unreadable")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    path = write(tmp_path, "a.npy", npy(np.array([[Trap()], [Trap()]], dtype=object), pickled=True))
    refused(path, "embeddings_pickled")
    assert not (tmp_path / "sprung").exists()


# --------------------------------------------------------------------------------------------- from the first 64 KiB


def sniffed(content: bytes, name: str, columns: dict[str, Any] | None = None) -> CorpusError:
    with pytest.raises(CorpusError) as caught:
        sniff_corpus(content[:65536], name, options(columns), complete=False)
    return caught.value


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_what_the_head_shows_is_refused_without_a_count(pack: Any) -> None:
    text = (
        np.random.default_rng(0)
        .permutation(np.frombuffer(b"abcdefghijklmnopqrstuvwxyz " * 20_000, np.uint8))
        .tobytes()
    )
    long = b"\n".join(b'{"text": "%s"}' % text[i : i + 60] for i in range(0, len(text), 60))
    for bad, code in {
        b"{]": "corpus_bad_line",
        b"\xff": "corpus_invalid_utf8",
        b"\0": "corpus_nul_bytes",
    }.items():
        content = pack(b'{"text": "one"}\n' + bad + b"\n" + long)
        assert len(content) > 65536
        error = sniffed(content, "a.jsonl")
        assert (error.code, error.row, error.count) == (code, 2, None)
    assert sniffed(pack(long), "a.jsonl", {"text": "body"}).code == "corpus_column_missing"
    assert sniff_corpus(pack(long)[:65536], "a.jsonl", CorpusOptions(), complete=False) is CorpusFormat.JSONL


def test_a_head_may_end_inside_a_code_point_or_a_quoted_field() -> None:
    umlauts = ("ü" * 50 + "\n").encode() * 2000
    for cut in (65535, 65536):
        assert sniff_corpus(umlauts[:cut], "a.txt", CorpusOptions(), complete=False) is CorpusFormat.TXT
    record = b'"a text\nof two lines",1\n'
    content = b"text,id\n" + record * 5000
    for cut in range(60_000, 60_000 + len(record)):
        assert sniff_corpus(content[:cut], "a.csv", CorpusOptions(), complete=False) is CorpusFormat.CSV


def test_a_head_without_a_row_says_nothing_about_the_rest() -> None:
    assert sniff_corpus(b"\n" * 65536, "a.jsonl", CorpusOptions(), complete=False) is CorpusFormat.JSONL
    error = sniffed(b"{]\n" * 30_000, "a.jsonl")
    assert (error.code, error.row, error.count) == ("corpus_bad_line", 1, None)


def test_a_first_row_longer_than_the_head() -> None:
    assert sniff_corpus(b"x" * 65536, "a.txt", CorpusOptions(), complete=False) is CorpusFormat.TXT
    assert sniff_corpus("xü".encode() * 30_000, "a.txt", CorpusOptions(), complete=False) is CorpusFormat.TXT
    assert sniffed(b"x" * 60_000 + b"\0" * 5_000, "a.txt").code == "corpus_nul_bytes"
    assert sniffed(b"x" * 60_000 + b"\xff" * 5_000, "a.txt").code == "corpus_invalid_utf8"
    with pytest.raises(CorpusError, match="corpus_row_too_large"):
        sniff_corpus(b"x" * 65536, "a.txt", CorpusOptions(), complete=False, max_row_bytes=1000)


def test_binary_heads() -> None:
    assert sniffed(NOISE * 3, "a.jsonl").code == "corpus_not_text"
    assert sniffed(npy(np.full((20_000,), None), pickled=True), "a.npy").code == "embeddings_pickled"
    assert sniffed(gzip.compress(b"x")[:10] + NOISE, "a.jsonl").code == "corpus_gzip_damaged"
    for name, content, expected in (
        ("v.npy", npy(np.ones((5000, 9))), CorpusFormat.NPY),
        ("v.npz", npz(a=np.ones((5000, 9))), CorpusFormat.NPZ),
        ("v.parquet", parquet({"text": [str(i) * 9 for i in range(50_000)]}), CorpusFormat.PARQUET),
    ):
        assert sniff_corpus(content[:65536], name, CorpusOptions(), complete=False) is expected
