"""Every format gives the rows that stand in the file; the format is told from the content."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_service.corpus import read_corpus, sniff_corpus
from probe_service.schemas import CorpusFormat, CorpusKind, CorpusOptions
from tests.unit.corpus_files import jsonl, options, read, write

TEXTS = ["How do I reset it?", 'Say "hello", please', "Größe ändern – ß"]
GROUPS = ["reset", None, "size"]


def sentences_file(folder: Path, name: str) -> Path:
    """The three texts with their groups, as each format writes them."""
    rows = list(zip(TEXTS, GROUPS, strict=True))
    match name.removesuffix(".gz").rsplit(".")[-1]:
        case "txt":
            content = "\n".join(TEXTS).encode()
        case "jsonl":
            content = jsonl(*({"text": text, "group": group} for text, group in rows))
        case "csv":
            buffer = io.StringIO(newline="")
            csv.writer(buffer).writerows([("text", "group"), *rows])
            content = buffer.getvalue().encode()
        case "tsv":
            content = "\n".join(
                "\t".join((text, group or "")) for text, group in [("text", "group"), *rows]
            ).encode()
        case _:
            buffer_ = io.BytesIO()
            pq.write_table(pa.table({"text": TEXTS, "group": GROUPS}), buffer_)
            content = buffer_.getvalue()
    return write(folder, name, content)


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "tsv", "parquet"])
def test_sentences_of_each_format(tmp_path: Path, suffix: str, packed: str) -> None:
    path = sentences_file(tmp_path, f"three.{suffix}{packed}")
    corpus = read(path)
    assert corpus.kind is CorpusKind.SENTENCES
    assert corpus.anchors == TEXTS
    assert corpus.row_numbers.tolist() == [1, 2, 3]
    assert (corpus.positives, corpus.negatives, corpus.vectors) == (None, None, None)
    assert (corpus.info.rows_read, corpus.info.rows_usable, corpus.info.rows_encoded) == (3, 3, 3)
    assert corpus.info.format == f"{suffix}{packed}"
    assert corpus.info.name == f"three.{suffix}{packed}"
    if suffix != "txt":
        assert corpus.groups == GROUPS
        assert (corpus.info.groups, corpus.info.rows_without_group) == (2, 1)
        assert corpus.info.columns.group == "group"
    assert corpus.info.columns.text == "text"
    assert sniff_corpus(path.read_bytes(), path.name, CorpusOptions(), complete=True).value == suffix


def test_the_same_rows_have_the_same_content_hash_in_every_format(tmp_path: Path) -> None:
    names = ["a.jsonl", "b.csv", "c.tsv.gz", "d.parquet", "e.parquet.gz"]
    hashes = {read(sentences_file(tmp_path, name)).info.sha256 for name in names}
    assert len(hashes) == 1
    other = write(
        tmp_path, "other.jsonl", jsonl({"text": TEXTS[0], "group": "reset"}, {"text": TEXTS[1], "group": "x"})
    )
    assert read(other).info.sha256 not in hashes


def test_the_content_hash_tells_rows_apart_whose_parts_are_shifted(tmp_path: Path) -> None:
    first = write(
        tmp_path, "1.jsonl", jsonl({"anchor": "a b", "positive": "c"}, {"anchor": "d", "positive": "e"})
    )
    second = write(
        tmp_path, "2.jsonl", jsonl({"anchor": "a", "positive": "b c"}, {"anchor": "d", "positive": "e"})
    )
    assert read(first).info.sha256 != read(second).info.sha256


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    bom = b"\xef\xbb\xbf"
    for name, content in {
        "a.txt": b"one\r\ntwo\r\n",
        "a.csv": b"text\r\none\r\ntwo\r\n",
        "a.tsv": b"text\tid\r\none\t1\r\ntwo\t2\r\n",
        "a.jsonl": b'{"text": "one"}\r\n{"text": "two"}\r\n',
    }.items():
        assert read(write(tmp_path, name, bom + content)).anchors == ["one", "two"], name


def test_csv_fields_may_hold_separators_quotes_and_line_ends(tmp_path: Path) -> None:
    content = b'id,question,answer\n7,"Where, exactly?","In ""Settings""\nbelow"\n8,How?,So\n'
    corpus = read(write(tmp_path, "a.csv", content))
    assert corpus.kind is CorpusKind.PAIRS
    assert corpus.anchors == ["Where, exactly?", "How?"]
    assert corpus.positives == ['In "Settings"\nbelow', "So"]
    assert corpus.ids == ["7", "8"]
    assert corpus.row_numbers.tolist() == [1, 2]


def test_tsv_takes_off_quotes_only_where_they_are_well_formed(tmp_path: Path) -> None:
    content = b'text\tgroup\n"It is so," he said.\ta\n"say ""yes"""\tb\n"open\tc\n'
    assert read(write(tmp_path, "a.tsv", content)).anchors == ['"It is so," he said.', 'say "yes"', '"open']


def test_jsonl_lines_may_be_strings_and_hold_any_json(tmp_path: Path) -> None:
    content = b'"one"\n{"text": "two", "score": NaN, "n": 123456789012345678901234567890, "x": {"y": [1]}}\n'
    corpus = read(write(tmp_path, "a.jsonl", content))
    assert corpus.anchors == ["one", "two"]


def test_flagembedding_rows_take_the_first_usable_positive(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "a.jsonl",
        jsonl(
            {"query": "q1", "pos": ["p1", "p1b", "p1c"], "neg": ["n1", "n2"]},
            {"query": "q2", "pos": ["", "p2"], "neg": []},
            {"query": "q3", "pos": ["p3"], "neg": ["n3", None, " ", 5]},
            {"query": "q4", "pos": [], "neg": ["n4"]},
        ),
    )
    corpus = read(path)
    assert corpus.kind is CorpusKind.TUPLES
    assert corpus.anchors == ["q1", "q2", "q3"]
    assert corpus.positives == ["p1", "p2", "p3"]
    assert corpus.negatives == [["n1", "n2"], [], ["n3"]]
    assert corpus.info.hard_negatives == 3
    assert corpus.info.hard_negatives_left_out == 3
    assert corpus.info.further_positives == 2
    assert [(e.reason, e.rows) for e in corpus.info.excluded] == [("null", [4])]


def test_tevatron_passages_are_title_and_text(tmp_path: Path) -> None:
    def passage(number: int, title: str) -> dict[str, str]:
        return {"docid": f"d{number}", "title": title, "text": f"text {number}"}

    path = write(
        tmp_path,
        "a.jsonl",
        jsonl(
            {
                "query_id": "1",
                "query": "q1",
                "positive_passages": [passage(1, "T1")],
                "negative_passages": [passage(2, "")],
            },
            {
                "query_id": "2",
                "query": "q2",
                "positive_passages": [passage(3, "T3")],
                "negative_passages": [],
            },
        ),
    )
    corpus = read(path)
    assert corpus.kind is CorpusKind.TUPLES
    assert corpus.ids == ["1", "2"]
    assert corpus.positives == ["T1 text 1", "T3 text 3"]
    assert corpus.negatives == [["text 2"], []]


def test_tuples_with_a_column_for_each_negative(tmp_path: Path) -> None:
    content = b"anchor,positive,negative_1,negative_2\na1,p1,n1,n2\na2,p2,n3,\n"
    corpus = read(write(tmp_path, "a.csv", content))
    assert corpus.negatives == [["n1", "n2"], ["n3"]]
    assert corpus.info.columns.negatives == ("negative_1", "negative_2")
    assert corpus.info.hard_negatives_left_out == 0


VECTORS = np.array([[1.0, 0.0], [0.0, 0.0], [0.5, np.nan], [-3.0, 4.0]], np.float32)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["v.npy", "v.npy.gz", "v.npz", "v.npz.gz"])
def test_arrays(tmp_path: Path, name: str, dtype: Any, order: Any) -> None:
    buffer = io.BytesIO()
    vectors = np.asarray(VECTORS, dtype, order=order)
    np.savez_compressed(buffer, vectors) if ".npz" in name else np.save(buffer, vectors)
    corpus = read(write(tmp_path, name, buffer.getvalue()))
    assert corpus.kind is CorpusKind.EMBEDDINGS
    assert corpus.anchors is None
    assert corpus.vectors is not None
    assert corpus.vectors.dtype == np.float32
    np.testing.assert_array_equal(corpus.vectors, [[1, 0], [-3, 4]])
    assert corpus.row_numbers.tolist() == [1, 4]
    assert [(e.reason, e.count, e.rows) for e in corpus.info.excluded] == [
        ("non_finite_vector", 1, [3]),
        ("zero_vector", 1, [2]),
    ]


def test_npz_with_texts_ids_and_groups_beside_the_vectors(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(
        buffer,
        embeddings=np.eye(3),
        text=np.array(["a", "b", "c"]),
        id=np.arange(3),
        group=np.array(["g", "g", "h"]),
    )
    corpus = read(write(tmp_path, "v.npz", buffer.getvalue()))
    assert (corpus.anchors, corpus.ids, corpus.groups) == (["a", "b", "c"], ["0", "1", "2"], ["g", "g", "h"])


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float64()), pa.list_(pa.float32(), 2), pa.large_list(pa.float16())]
)
def test_parquet_embeddings(tmp_path: Path, kind: pa.DataType) -> None:
    vectors = [np.array(v, kind.value_type.to_pandas_dtype()) for v in ([1.0, 0.0], [0.0, 2.0], [0.0, 0.0])]
    path = tmp_path / "v.parquet"
    pq.write_table(pa.table({"id": ["a", "b", "c"], "embeddings": pa.array(vectors, kind)}), path)
    corpus = read(path)
    np.testing.assert_array_equal(corpus.vectors, [[1, 0], [0, 2]])
    assert corpus.ids == ["a", "b"]
    assert [(e.reason, e.rows) for e in corpus.info.excluded] == [("zero_vector", [3])]


def test_embeddings_with_nulls_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    vectors = [[1.0, 0.0], None, [0.0, None], [2.0, 1.0], [1e300, 1.0], [3.0, 3.0]]
    texts = ["a", "b", "c", None, "e", "f"]
    pq.write_table(pa.table({"text": texts, "vec": vectors}), path)
    corpus = read(path, {"embedding": "vec"})
    assert corpus.anchors == ["a", "f"]
    np.testing.assert_array_equal(corpus.vectors, [[1, 0], [3, 3]])
    assert [(e.reason, e.rows) for e in corpus.info.excluded] == [
        ("non_finite_vector", [3, 5]),
        ("null", [2, 4]),
    ]


def test_jsonl_embeddings(tmp_path: Path) -> None:
    corpus = read(
        write(tmp_path, "a.jsonl", jsonl({"embedding": [1, 2]}, {"embedding": [0.5, 0]}, {"embedding": None}))
    )
    np.testing.assert_array_equal(corpus.vectors, [[1, 2], [0.5, 0]])


def test_the_content_hash_of_vectors(tmp_path: Path) -> None:
    vectors = np.array([[1.0, 2.0], [3.0, 4.0]])
    np.save(tmp_path / "a.npy", vectors)
    np.save(tmp_path / "b.npy", vectors.astype(np.float32))
    np.save(tmp_path / "c.npy", vectors[::-1])
    pq.write_table(pa.table({"vector": vectors.tolist()}), tmp_path / "d.parquet")
    a, b, c, d = (read(tmp_path / name).info.sha256 for name in ("a.npy", "b.npy", "c.npy", "d.parquet"))
    assert a == b == d != c


def test_equal_vectors_without_texts_are_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    np.save(path, np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
    duplicates = read(path).info.duplicates
    assert (duplicates.exact, duplicates.normalized, duplicates.case_folded) == (1, 1, 1)
    assert duplicates.rows == [3]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x", b'{"text": "a"}\n{"text": "b"}\n', CorpusFormat.JSONL),
        ("x.txt", b'{"text": "a"}\n{"text": "b"}\n', CorpusFormat.JSONL),
        ("x", b"one\ntwo\n", CorpusFormat.TXT),
        ("x", b"text,group\na,b\nc,d\n", CorpusFormat.CSV),
        ("x", b"question\tanswer\na\tb\nc\td\n", CorpusFormat.TSV),
        ("x.ndjson", b'"a"\n"b"\n', CorpusFormat.JSONL),
        ("notes.dat.gz", b'{"text": "a"}\n{"text": "b"}\n', CorpusFormat.JSONL),
        ("x.JSONL", b'{"text": "a"}\n{"text": "b"}\n', CorpusFormat.JSONL),
        ("gzip-with-another-name.txt", gzip.compress(b"one\ntwo\n", mtime=0), CorpusFormat.TXT),
    ],
)
def test_format_is_told_from_content_and_name(
    tmp_path: Path, name: str, content: bytes, expected: CorpusFormat
) -> None:
    path = write(tmp_path, name, content)
    assert sniff_corpus(path.read_bytes(), name, CorpusOptions(), complete=True) is expected
    assert len(read(path)) == 2


def test_a_parquet_file_is_known_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)
    assert read(path).info.format == "parquet"


def test_the_request_may_name_the_format(tmp_path: Path) -> None:
    path = write(tmp_path, "x.txt", b'{"text": "a"}\n{"text": "b"}\n')
    assert read(path, format="txt").anchors == ['{"text": "a"}', '{"text": "b"}']


@settings(deadline=None)
@given(
    rows=st.lists(
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=40).filter(
            str.strip
        ),
        min_size=2,
        max_size=50,
    ),
    ascii_only=st.booleans(),
)
def test_jsonl_gives_back_the_texts(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in rows]
    path.write_text("\n".join(lines), encoding="utf-8", newline="\n")
    corpus = read_corpus(path, options(), sample_size=100, rng=np.random.default_rng(0))
    assert corpus.anchors == rows
    assert corpus.row_numbers.tolist() == list(range(1, len(rows) + 1))


@settings(deadline=None)
@given(
    rows=st.lists(
        st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=30).filter(str.strip),
        min_size=2,
        max_size=30,
    )
)
def test_csv_gives_back_the_texts(tmp_path_factory: pytest.TempPathFactory, rows: list[str]) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "id"), *((text, str(i)) for i, text in enumerate(rows))])
    assert read_corpus(path, options(), sample_size=100, rng=np.random.default_rng(0)).anchors == rows


def test_importing_the_reader_loads_neither_torch_nor_datasets(repository: Path) -> None:
    code = "import sys, probe_service.corpus; print([m for m in ('torch', 'datasets', 'pandas') if m in sys.modules])"
    done = run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
