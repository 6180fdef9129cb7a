"""The promises of examples/README.md, checked against the files."""

import json
import re
from collections import Counter, defaultdict
from itertools import combinations, pairwise
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = ("helpdesk.jsonl", "helpdesk_pairs.jsonl", "helpdesk_tuples.jsonl")
SOURCES = {"chat", "email", "kb-search", "phone-notes", "web-form"}
FRAME_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are at can do does for from hello hi how i in is it me my of on or our please the to we",
    )
)


def rows_of(name: str) -> list[dict]:
    lines = (EXAMPLES / name).read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    return [json.loads(line) for line in lines]


def cells_of(row: dict) -> list[str]:
    return [cell for value in row.values() for cell in (value if isinstance(value, list) else [value])]


def words(text: str) -> Counter:
    return Counter(re.findall(r"[a-z0-9']+", text.casefold()))


def letters(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def one_slip_apart(left: str, right: str) -> bool:
    """One letter changed, added, left out, or two neighbours swapped."""
    start = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    rest_left, rest_right = left[start:], right[start:]
    return (
        rest_left[1:] == rest_right[1:]
        or rest_left[1:] == rest_right
        or rest_left == rest_right[1:]
        or (rest_left[:2] == rest_right[1::-1] and rest_left[2:] == rest_right[2:])
    )


def look_alike_groups(texts_by_group: dict[str, list[str]]) -> set[str]:
    """Groups with a text that differs from one of another group by at most two words on either side.

    The two share at least two words that carry meaning: "How do I … a …" alone is no likeness.
    """
    sharing = defaultdict(set)
    for group, texts in texts_by_group.items():
        for text in texts:
            for two_words in combinations(sorted(words(text).keys() - FRAME_WORDS), 2):
                sharing[two_words].add((group, text))
    alike = set()
    for rows in sharing.values():
        for (group, text), (other, other_text) in combinations(sorted(rows), 2):
            bag, other_bag = words(text), words(other_text)
            if group != other and max(bag.total(), other_bag.total()) - (bag & other_bag).total() <= 2:
                alike |= {group, other}
    return alike


@pytest.fixture(scope="module")
def questions() -> list[dict]:
    return rows_of("helpdesk.jsonl")


@pytest.fixture(scope="module")
def texts_by_group(questions: list[dict]) -> dict[str, list[str]]:
    grouped = defaultdict(list)
    for row in questions:
        grouped[row["group"]].append(row["text"])
    return dict(grouped)


@pytest.mark.parametrize("name", FILES)
def test_every_cell_is_a_trimmed_text_of_at_most_300_characters(name):
    for row in rows_of(name):
        for cell in cells_of(row):
            assert isinstance(cell, str)
            assert cell == cell.strip() != ""
            assert len(cell) <= 300
            assert cell.isprintable()


@pytest.mark.parametrize("name", FILES)
def test_columns_are_the_same_in_every_row(name):
    columns = {
        "helpdesk.jsonl": ["text", "group", "source"],
        "helpdesk_pairs.jsonl": ["anchor", "positive", "source"],
        "helpdesk_tuples.jsonl": ["query", "pos", "neg", "source"],
    }[name]
    assert all(list(row) == columns for row in rows_of(name))
    assert {row["source"] for row in rows_of(name)} <= SOURCES


def test_readme_states_the_counts(questions, texts_by_group):
    readme = " ".join((EXAMPLES / "README.md").read_text(encoding="utf-8").split())
    assert f"{len(questions):,} questions in {len(texts_by_group)} groups" in readme
    assert f"{len(rows_of('helpdesk_pairs.jsonl'))} questions with their answers" in readme
    assert f"{len(rows_of('helpdesk_tuples.jsonl'))} questions with an answer and" in readme
    sizes = [len(texts) for texts in texts_by_group.values()]
    assert f"{sum(size <= 2 for size in sizes)} groups have one or two ({sizes.count(1)} have one)" in readme
    assert f"{len(look_alike_groups(texts_by_group))} groups have a text that differs" in readme
    assert (
        f"{len(questions) - len({row['text'] for row in questions})} rows repeat another byte for byte"
        in readme
    )
    for source, count in Counter(row["source"] for row in questions).items():
        assert re.search(rf"`{source}` \({count}\b", readme)
    answers = Counter(row["positive"] for row in rows_of("helpdesk_pairs.jsonl"))
    assert (
        f"There are {len(answers)} answers; {sum(count > 1 for count in answers.values())} of them" in readme
    )
    longest = max(len(row["text"]) for row in questions)
    assert f"at most {longest} characters" in readme
    assert len(questions) >= 1_500
    assert len(texts_by_group) >= 300


def test_group_sizes_have_a_heavy_head_and_a_long_tail(questions, texts_by_group):
    sizes = sorted((len(texts) for texts in texts_by_group.values()), reverse=True)
    assert 3 <= sum(30 <= size <= 60 for size in sizes) <= 6
    assert max(sizes) <= 60
    assert sum(size <= 2 for size in sizes) >= 100
    assert sum(size == 1 for size in sizes) >= 40
    tenth = len(sizes) // 10
    assert sum(sizes[:tenth]) >= len(questions) / 3


def test_every_source_has_a_voice_of_its_own(questions):
    by_source = defaultdict(list)
    for row in questions:
        by_source[row["source"]].append(row["text"])
    assert set(by_source) == SOURCES
    assert min(map(len, by_source.values())) >= 150
    mean_words = {
        source: sum(len(text.split()) for text in texts) / len(texts) for source, texts in by_source.items()
    }
    assert min(mean_words, key=mean_words.__getitem__) == "kb-search"
    assert max(mean_words, key=mean_words.__getitem__) == "email"
    greeted = Counter(
        source
        for source, texts in by_source.items()
        for text in texts
        if re.match(r"(hi|hello)\b", text, re.I)
    )
    assert greeted["email"] > 100 > 10 * greeted["kb-search"]


def test_a_text_belongs_to_one_group_whatever_its_case_and_punctuation(texts_by_group):
    home: dict[str, str] = {}
    for group, texts in texts_by_group.items():
        for text in texts:
            assert home.setdefault(letters(text), group) == group


def test_exact_repeats_and_near_repeats_are_there(questions, texts_by_group):
    assert 25 <= len(questions) - len({row["text"] for row in questions}) <= 40
    near = set()
    for group, texts in texts_by_group.items():
        for left, right in combinations(sorted(set(texts)), 2):
            if one_slip_apart(letters(left), letters(right)):
                near |= {(group, left), (group, right)}
    assert len(near) >= 60


def test_at_least_sixty_groups_look_like_another_group(texts_by_group):
    assert len(look_alike_groups(texts_by_group)) >= 60


def test_look_alikes_are_told_from_mere_frames():
    assert look_alike_groups(
        {"a": ["How do I add a user to a list"], "b": ["How do I drop a user from a list"]}
    )
    assert not look_alike_groups({"a": ["How do I add a user"], "b": ["How do I print a letter"]})


@pytest.mark.parametrize(
    ("text", "look_alike"),
    [
        ("How do I add a user to a shared mailbox?", "How do I remove a user from a shared mailbox?"),
        ("can't log in on my phone", "can't log in on my laptop"),
        ("How do I upgrade our plan?", "How do I downgrade our plan?"),
        ("Invoice is missing", "Invoice is wrong"),
    ],
)
def test_named_look_alikes_do_not_mean_the_same(questions, text, look_alike):
    groups = {row["text"]: row["group"] for row in questions}
    assert groups[text] != groups[look_alike]


def test_rows_are_shuffled(questions):
    neighbours = sum(a["group"] == b["group"] for a, b in pairwise(questions))
    assert neighbours < 40


def test_pairs_repeat_some_answers_and_no_row():
    pairs = rows_of("helpdesk_pairs.jsonl")
    anchors = Counter(row["anchor"] for row in pairs)
    answers = Counter(row["positive"] for row in pairs)
    assert 140 <= len(pairs) <= 180
    assert max(anchors.values()) == 1
    assert sum(count - 1 for count in answers.values()) >= 15


def test_tuples_carry_one_answer_and_a_varying_number_of_wrong_ones():
    tuples = rows_of("helpdesk_tuples.jsonl")
    answers = {row["positive"] for row in rows_of("helpdesk_pairs.jsonl")}
    assert 55 <= len(tuples) <= 70
    assert {len(row["neg"]) for row in tuples} == {1, 2, 3, 4, 5}
    for row in tuples:
        assert len(row["pos"]) == 1
        assert len(set(row["neg"])) == len(row["neg"])
        assert not set(row["pos"]) & set(row["neg"])
        assert set(row["pos"] + row["neg"]) <= answers


def test_questions_of_the_small_files_are_questions_of_the_corpus(questions):
    texts = {row["text"] for row in questions}
    assert {row["anchor"] for row in rows_of("helpdesk_pairs.jsonl")} <= texts
    assert {row["query"] for row in rows_of("helpdesk_tuples.jsonl")} <= texts
