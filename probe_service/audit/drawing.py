"""What to ask: pairs in proportion to the push that they receive, some of them twice, and hidden checks among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from probe_service.audit.record import Audit, AuditItem, ItemKind
from probe_service.corpus import Corpus, load_corpus, normalize_text
from probe_service.errors import InputError, RequestError
from probe_service.estimate import SUB_POOLS, WHOLE, Evidence, SamplingPlan
from probe_service.estimate.audit import (
    MOST_ATTEMPTS_PER_PAIR,
    AuditDesign,
    DrawnPair,
    JudgedShares,
    draw_pairs,
)
from probe_service.judges import Question, question_digest
from probe_service.measure import Shares, no_full_batch
from probe_service.schemas import ProbeRequest
from probe_service.similarity import measure_batches, stack_size
from probe_service.workspace import Workspace

__all__ = ["DEFAULT_CHECKS", "DEFAULT_LABELS", "DrawnAudit", "draw_audit"]

DEFAULT_LABELS = 200
"""Standard error of S at most about .045 at every N from 2 to 1024 (STATISTICS §6)."""
DEFAULT_CHECKS = 20
"""Hidden checks of each kind."""
REPEATED_SHARE = 0.2

_UNJUDGED_GROUP = -1
_GRID_RATIO = 2**0.5
_CHECK_BATCH = 64
_CHECK_ATTEMPTS = 50
_LEAST_SIMILAR_SHARE = 0.1
_DRAWS, _CHECKS, _ORDER = 1, 2, 3
_FRESH_UNITS = 2**40


@dataclass(frozen=True)
class DrawnAudit:
    """Both halves of an audit.

    Args:
        audit: The private half.
        questions: The blind half, in the order in which they are asked.
    """

    audit: Audit
    questions: list[Question]


@dataclass(frozen=True)
class _Material:
    """What the workspace left after `gather`, with the texts of the encoded rows."""

    corpus: Corpus
    rows: NDArray[np.int64]
    hard_negatives: Sequence[str]
    anchors: NDArray[np.float32]
    positives: NDArray[np.float32] | None
    evidence: Evidence
    plan: SamplingPlan

    def question(self, id_: str, anchor: int, candidate: int) -> Question:
        return Question(
            id_, self.anchor_text(anchor), self.positive_text(anchor), self.candidate_text(candidate)
        )

    def anchor_text(self, row: int) -> str:
        assert self.corpus.anchors is not None
        return self.corpus.anchors[int(self.rows[row])]

    def positive_text(self, row: int) -> str | None:
        return None if self.corpus.positives is None else self.corpus.positives[int(self.rows[row])]

    def candidate_text(self, row: int) -> str:
        if row >= len(self.anchors):
            return self.hard_negatives[row - len(self.anchors)]
        return self.positive_text(row) or self.anchor_text(row)


def draw_audit(
    work: Workspace,
    folder: Path,
    request: ProbeRequest,
    *,
    labels: int = DEFAULT_LABELS,
    checks: int = DEFAULT_CHECKS,
    checkpoint: Callable[[], None] = lambda: None,
) -> DrawnAudit:
    """Draw an audit of a corpus that a workspace has read and encoded (its steps up to `gather` are done).

    Pairs are drawn from the mean of q_N over the workspace's sizes, without those that are certain or labelled; S can
    then be estimated at every integer from 2 to the largest size. Questions that show the same texts are one question.
    A fifth of them are asked twice, sentences the other way round. Hidden checks are of two kinds:

    - certain duplicates: known false negatives that do not read alike, where the corpus has them; else a text with
      another case and punctuation than itself, which any judge should accept;
    - certain others: pairs whose groups differ, drawn like the audit's own, where the corpus has groups; else pairs
      from the least similar tenth of all.

    Args:
        work: The workspace.
        folder: Its folder.
        request: What the workspace was made for.
        labels: L, pairs to draw.
        checks: Hidden checks of each kind.
        checkpoint: Called often; may raise.

    Raises:
        InputError: audit_needs_texts; audit_nothing_to_ask where everything is judged.
        RequestError: audit_too_few_labels; batch_size_too_large where no size allows an interval.
    """
    if labels < 2:
        raise RequestError(
            "audit_too_few_labels", f"An audit needs at least 2 labels, not {labels}.", column="labels"
        )
    corpus = load_corpus(folder / "corpus")
    if corpus.anchors is None:
        raise InputError(
            "audit_needs_texts", "The corpus has vectors but no texts; nobody can judge what cannot be read."
        )
    rows: NDArray[np.int64] = np.load(folder / "kept_rows.npy", allow_pickle=False)
    negatives = (
        [text for row in rows for text in corpus.negatives[row]] if corpus.negatives is not None else []
    )
    material = _Material(corpus, rows, negatives, work.anchors, work.positives, work.evidence, work.plan)
    drawn_sizes = [size for size in work.sizes if size <= material.plan.largest_size_with_interval]
    if not drawn_sizes:
        raise RequestError(
            "batch_size_too_large",
            f"{len(rows)} of {work.corpus_info.rows_usable} rows are encoded, which supports intervals up to batches of "
            f"{material.plan.largest_size_with_interval}; raise max_rows or lower the batch sizes.",
            column="batch_sizes",
        )
    rng = np.random.default_rng([request.seed, _DRAWS])
    shares = Shares(work.lay_out(floor=None), drawn_sizes, request, work.training_rows, None, work.scratch)
    if not shares.setting.plain:
        design, judged = _draw_from_batches(shares, drawn_sizes, request, labels, rng, checkpoint)
    else:
        design, judged = _draw_from_all_pairs(material, drawn_sizes, request, labels, rng, checkpoint)
    items, questions = _sheet(material, design, request, checks)
    return DrawnAudit(
        Audit(
            id=np.random.default_rng([request.seed, _ORDER]).bytes(4).hex() + corpus.info.sha256[:8],
            corpus_sha256=work.corpus_info.sha256,
            corpus_name=work.corpus_info.name,
            encoder=work.encoder_info.name,
            encoder_fingerprint=work.encoder_info.fingerprint,
            request=request,
            design=design,
            judged=judged,
            items=tuple(items),
        ),
        questions,
    )


def _draw_from_all_pairs(
    material: _Material,
    sizes: list[int],
    request: ProbeRequest,
    labels: int,
    rng: np.random.Generator,
    checkpoint: Callable[[], None],
) -> tuple[AuditDesign, dict[int, JudgedShares]]:
    """Draw for several sizes at once: q_N of every pair is known."""
    design = None
    if material.evidence.unjudged_rows is not None:
        design = draw_pairs(
            material.anchors,
            material.positives,
            drawn_sizes=sizes,
            sizes=_grid(max(sizes)),
            temperature=request.temperature,
            is_judged=partial(_is_judged, material.evidence),
            count=labels,
            rng=rng,
            checkpoint=checkpoint,
        )
    if design is None:
        raise _nothing_to_ask()
    judged = {
        size: _judged_shares(material, size, request.temperature, checkpoint)
        for size in sorted({2, *design.drawn_sizes})
    }
    return design, judged


def _draw_from_batches(
    shares: Shares,
    sizes: list[int],
    request: ProbeRequest,
    labels: int,
    rng: np.random.Generator,
    checkpoint: Callable[[], None],
) -> tuple[AuditDesign, dict[int, JudgedShares]]:
    """Draw at one size as training would: a batch of the sampler, an anchor, a negative by its weight.

    Then every label counts alike, and the share of yes is S of what nothing is known about, for any sampler and with hard
    negatives among the candidates. At another size the labels would weigh differently, and nobody knows by how much.
    """
    if len(sizes) != 1:
        raise RequestError(
            "audit_one_size",
            "Under this sampler, or with hard negatives among the candidates, pairs are drawn at one batch size; name it "
            f"(of {', '.join(map(str, sizes))}).",
            column="batch_sizes",
        )
    (size,) = sizes
    draws, softmaxes = shares.draws, shares.softmaxes
    ((pool, units),) = [stream for stream in draws.streams(size) if stream[0] == WHOLE]
    known, unjudged = [], []
    for number in range(units):
        batches = draws.unit(size, pool, number)
        if not len(batches):
            raise no_full_batch(draws, size)
        found = softmaxes.measure(batches, draws.rng(size, pool, number), checkpoint)
        known.append(found.false_share.mean())
        unjudged.append((found.worst_share - found.false_share).mean())
    if units == 1:
        # All batches that there are: these shares have no error.
        judged = JudgedShares(float(known[0]), float(unjudged[0]), 0.0, 0.0, 0.0)
    else:
        judged = JudgedShares.from_batches(np.array(known), np.array(unjudged))
    pairs: list[DrawnPair] = []
    attempts = 0
    while len(pairs) < labels:
        if attempts >= MOST_ATTEMPTS_PER_PAIR * (len(pairs) + 1):
            raise _nothing_to_ask()
        # A batch, or an epoch, of its own for every draw, so that draws are independent.
        batches = draws.unit(size, pool, 0 if units == 1 else int(rng.integers(_FRESH_UNITS)))
        if not len(batches):
            raise no_full_batch(draws, size)
        drawn = softmaxes.draw_pair(batches[int(rng.integers(len(batches)))], rng)
        attempts += 1
        if not drawn.judged:
            pairs.append(DrawnPair(drawn.anchor, drawn.candidate, (1.0,), 1.0))
        checkpoint()
    design = AuditDesign(
        sizes=(size,),
        drawn_sizes=(size,),
        temperature=request.temperature,
        rows=len(shares.population),
        ordered_pairs=shares.population.positives is not None,
        pairs=tuple(pairs),
    )
    return design, {size: judged}


def _nothing_to_ask() -> InputError:
    return InputError(
        "audit_nothing_to_ask",
        "Every pair that training would meet is judged already, by equal texts or by groups; `probe run` has the answer.",
    )


def _grid(largest: int) -> list[int]:
    """Sizes at which q_N is computed: every one up to 6, then close enough for interpolation."""
    sizes, size = {2, 3, 4, 5, 6, largest}, 6.0
    while size < largest:
        sizes.add(round(size))
        size *= _GRID_RATIO
    return sorted(size for size in sizes if size <= largest)


def _is_judged(
    evidence: Evidence, anchors: NDArray[np.int64], candidates: NDArray[np.int64]
) -> NDArray[np.bool_]:
    judged = _is_known(evidence, anchors, candidates)
    if evidence.group is not None:
        judged |= (evidence.group[anchors] != _UNJUDGED_GROUP) & (
            evidence.group[candidates] != _UNJUDGED_GROUP
        )
    return judged


def _is_known(
    evidence: Evidence, anchors: NDArray[np.int64], candidates: NDArray[np.int64]
) -> NDArray[np.bool_]:
    known = np.zeros(len(anchors), dtype=bool)
    found = evidence.known_pairs(np.stack([anchors, candidates], axis=1), slice(0, 1))
    known[found.batch] = True
    return known


def _judged_shares(
    material: _Material, size: int, temperature: float, checkpoint: Callable[[], None]
) -> JudgedShares:
    """Measure, on batches, how much of the push needs no label."""
    evidence, plan = material.evidence, material.plan
    if evidence.group is None and not evidence.false_negative_counts().any():
        return JudgedShares.nothing_known()

    def measured(pool: int, batches: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        rows = plan.batches(size, pool, 0, batches)
        known, all_counted = [], []
        for start in range(0, batches, stack_size(size)):
            part = rows[start : start + stack_size(size)]
            unjudged = evidence.unjudged_rows
            assert unjudged is not None
            found = measure_batches(
                torch.from_numpy(material.anchors[part]),
                None if material.positives is None else torch.from_numpy(material.positives[part]),
                temperature=temperature,
                k=1,
                thresholds=(),
                known=partial(evidence.known_pairs, part),
                certain=None,
                unjudged=torch.from_numpy(unjudged[part]),
                worst_case_similarity=None,  # every unjudged pair is counted
                checkpoint=checkpoint,
            )
            known.append(found.false_share)
            all_counted.append(found.worst_share)
        share = np.concatenate(known)
        return share, np.concatenate(all_counted) - share

    pools = []
    if plan.num_pool_batches(size):
        pools = [measured(pool, plan.num_pool_batches(size)) for pool in range(SUB_POOLS)]
    known, unjudged = measured(WHOLE, plan.num_batches(size))
    return JudgedShares.from_batches(known, unjudged, [(float(k.mean()), float(u.mean())) for k, u in pools])


def _sheet(
    material: _Material, design: AuditDesign, request: ProbeRequest, checks: int
) -> tuple[list[AuditItem], list[Question]]:
    """Make the questions and what they stand for, in one random order."""
    rng = np.random.default_rng([request.seed, _CHECKS])
    normalize = partial(normalize_text, case_fold=request.corpus.case_fold)
    used: set[str] = set()

    def new_id() -> str:
        while (name := rng.bytes(5).hex()) in used:
            pass
        used.add(name)
        return name

    asked: dict[str, tuple[Question, list[int]]] = {}
    for place, pair in enumerate(design.pairs):
        question = material.question(new_id(), pair.anchor, pair.candidate)
        asked.setdefault(question_digest(question, normalize), (question, []))[1].append(place)
    sheet: list[tuple[AuditItem, Question]] = [
        (AuditItem(question.id, ItemKind.PAIR, digest, tuple(draws)), question)
        for digest, (question, draws) in asked.items()
    ]
    for place in rng.permutation(len(asked))[: round(REPEATED_SHARE * len(asked))].tolist():
        item, first = sheet[place]
        again = Question(new_id(), first.anchor, first.positive, first.candidate)
        if first.positive is None:
            again = Question(again.id, first.candidate, None, first.anchor)
        sheet.append((AuditItem(again.id, ItemKind.REPEAT, item.digest, repeats=item.id), again))
    hidden = [
        (ItemKind.DUPLICATE, _duplicates(material, checks, rng)),
        (ItemKind.OTHER, _others(material, request.temperature, checks, rng)),
    ]
    for kind, found in hidden:
        for (anchor, positive, candidate), source in found:
            check = Question(new_id(), anchor, positive, candidate)
            sheet.append((AuditItem(check.id, kind, question_digest(check, normalize), source=source), check))
    order = rng.permutation(len(sheet)).tolist()
    return [sheet[place][0] for place in order], [sheet[place][1] for place in order]


_Check = tuple[tuple[str, str | None, str], str]


def _duplicates(material: _Material, count: int, rng: np.random.Generator) -> list[_Check]:
    """Pairs that certainly mean the same, and do not read alike to the letter."""
    found: list[_Check] = []
    some = rng.permutation(len(material.anchors))[:2000].astype(np.int64)
    known = material.evidence.known_pairs(some[None, :])
    for place in rng.permutation(len(known.anchor)).tolist():
        if len(found) == count:
            return found
        anchor, candidate = int(some[known.anchor[place]]), int(some[known.candidate[place]])
        shown = material.candidate_text(candidate)
        if normalize_text(shown, case_fold=True) not in {
            normalize_text(text, case_fold=True)
            for text in (material.anchor_text(anchor), material.positive_text(anchor) or "")
        }:
            texts = (material.anchor_text(anchor), material.positive_text(anchor), shown)
            found.append((texts, "known from equal texts, listed positives or one group"))
    for row in rng.integers(len(material.anchors), size=count - len(found)).tolist():
        texts = (
            material.anchor_text(row),
            material.positive_text(row),
            _restyled(material.candidate_text(row)),
        )
        found.append((texts, "the text itself with other case and punctuation"))
    return found


def _restyled(text: str) -> str:
    """Return the text with another case and another end."""
    body = text.rstrip(" .!?")
    lowered = body.lower()
    changed = lowered if lowered != body else body[:1].upper() + body[1:]
    return f"{changed}." if body == text else changed or text


def _others(material: _Material, temperature: float, count: int, rng: np.random.Generator) -> list[_Check]:
    """Pairs that certainly do not mean the same."""
    right = material.anchors if material.positives is None else material.positives
    rows, size = len(material.anchors), min(_CHECK_BATCH, len(material.anchors))
    chosen: list[tuple[int, int]] = []
    group = material.evidence.group
    if group is not None:
        for _ in range(_CHECK_ATTEMPTS * count):
            if len(chosen) == count:
                break
            batch = rng.choice(rows, size, replace=False)
            keys = right[batch[1:]] @ material.anchors[batch[0]] / temperature + rng.gumbel(size=size - 1)
            pair = np.array([batch[0], batch[1 + int(keys.argmax())]])
            differ = _UNJUDGED_GROUP not in group[pair] and group[pair[0]] != group[pair[1]]
            if differ and not _is_known(material.evidence, pair[:1], pair[1:])[0]:
                chosen.append((int(pair[0]), int(pair[1])))
    by_group = len(chosen)
    drawn = rng.integers(rows, size=(max(2000, 20 * count), 2))
    drawn = drawn[drawn[:, 0] != drawn[:, 1]]
    drawn = drawn[~_is_known(material.evidence, drawn[:, 0], drawn[:, 1])]
    similarities = np.einsum("nd,nd->n", material.anchors[drawn[:, 0]], right[drawn[:, 1]])
    least = drawn[similarities <= np.quantile(similarities, _LEAST_SIMILAR_SHARE)] if len(drawn) else drawn
    chosen += [(int(i), int(j)) for i, j in least[: count - by_group]]
    return [
        (
            (material.anchor_text(i), material.positive_text(i), material.candidate_text(j)),
            "their groups differ" if place < by_group else "from the least similar tenth of all pairs",
        )
        for place, (i, j) in enumerate(chosen)
    ]
