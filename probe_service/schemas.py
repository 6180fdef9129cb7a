"""The nouns of probe-service: what goes in (`ProbeRequest`), what comes out (`ProbeReport`), and job states.

Rates are fractions in 0–1 and end in ``_rate`` or ``_share``; similarities are cosines (higher is closer);
times end in ``_seconds``. Every estimate states its interval at the report's confidence level and how it was
obtained. This module is light: pydantic only.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SCHEMA_VERSION = "1.0"
CONFIDENCE_LEVEL = 0.95
DEFAULT_TEMPERATURE = 0.05
DEFAULT_TOP_K = 4
DEFAULT_NUM_REPEATS = 100
DEFAULT_BUDGET = 0.25
"""Below S = .29 masking true false negatives gains less than a point of MAP, with 95% confidence (docs/trials-measured.md)."""
SIMILARITY_THRESHOLDS = (0.7, 0.8, 0.9, 0.95)

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Cosine = Annotated[float, Field(ge=-1.0, le=1.0)]


class Noun(BaseModel):
    """Base of all nouns: frozen, and closed to fields that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_inf_nan="null", json_schema_serialization_defaults_required=True
    )


# ------------------------------------------------------------------------------------------------ the request


class CorpusKind(StrEnum):
    """What one row of the corpus is."""

    SENTENCES = "sentences"
    """One text a row; its positive is another view of itself (dropout)."""
    PAIRS = "pairs"
    """An anchor and its positive."""
    TUPLES = "tuples"
    """An anchor, its positive and its own hard negatives, whose number may vary by row."""
    EMBEDDINGS = "embeddings"
    """Vectors made elsewhere, with or without texts."""


class CorpusFormat(StrEnum):
    """How the bytes are read; each may also be gzip-packed."""

    TXT = "txt"
    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    PARQUET = "parquet"
    NPY = "npy"
    NPZ = "npz"


class ColumnRoles(Noun):
    """Which column plays which part; those left out are inferred from common names and echoed."""

    text: str | None = None
    anchor: str | None = None
    positive: str | None = None
    negatives: tuple[str, ...] = ()
    id: str | None = None
    group: str | None = None
    label: str | None = None
    source: str | None = None
    embedding: str | None = None


class CorpusOptions(Noun):
    """How to read a corpus."""

    format: CorpusFormat | None = Field(
        None, description="Inferred from the name and the first bytes if null."
    )
    kind: CorpusKind | None = Field(None, description="Inferred from the roles if null.")
    columns: ColumnRoles = ColumnRoles()
    where: dict[str, str] = Field(
        default_factory=dict,
        description="Keep only rows whose column has this value, e.g. {'split': 'train'}; count the others.",
    )
    max_rows: int | None = Field(
        None,
        ge=2,
        description="Encode at most this many rows, drawn uniformly without replacement (a reservoir).",
    )
    label_is_meaning: bool = Field(
        False, description="Treat the label column as groups of the same meaning. Topics are not meanings."
    )
    case_fold: bool = Field(False, description="Two texts that differ only in case count as equal.")


class SamplerKind(StrEnum):
    """How rows are put into batches; the name in sentence-transformers is in brackets."""

    RANDOM = "random"
    """A new random order each epoch, cut into batches (``BATCH_SAMPLER``, the default)."""
    SEQUENTIAL = "sequential"
    """File order, cut into batches: the same batches in every epoch (none; a sampler of one's own)."""
    NO_DUPLICATES = "no_duplicates"
    """A random order in which a row waits for a later batch if one of its texts stands in this one already
    (``NO_DUPLICATES`` and ``NO_DUPLICATES_HASHED``)."""
    GROUPED = "grouped"
    """Each device's batch from one source (several data sets; `GroupedPolicy` is ``MultiDatasetBatchSamplers``)."""


class GroupedPolicy(StrEnum):
    """Which source the next batch comes from."""

    ROUND_ROBIN = "round_robin"
    """Each in turn, until one has no further batch."""
    PROPORTIONAL = "proportional"
    """At random, each as often as it has batches (sentence-transformers' default)."""


class Direction(StrEnum):
    """What is compared with what; documents are the positives and the hard negatives."""

    QUERY_TO_DOC = "query_to_doc"
    """Anchor i with every document."""
    QUERY_TO_QUERY = "query_to_query"
    """Anchor i with every other anchor."""
    DOC_TO_QUERY = "doc_to_query"
    """Positive i with every anchor."""
    DOC_TO_DOC = "doc_to_doc"
    """Positive i with every document of another row."""


class PartitionMode(StrEnum):
    """What one softmax runs over."""

    JOINT = "joint"
    """All directions together."""
    PER_DIRECTION = "per_direction"
    """One direction each; the losses are averaged. Only for directions that hold the own pair."""


class SamplerOptions(Noun):
    """How a training run puts rows into batches and which of them its loss compares (docs/samplers.md)."""

    kind: SamplerKind = SamplerKind.RANDOM
    world_size: int = Field(1, ge=1, le=4096, description="Devices that take a step together.")
    gather: bool = Field(
        False,
        description="Whether the loss gathers all devices' candidates: a batch size N is then the global batch,"
        " N / world_size rows a device; else N is one device's batch.",
    )
    policy: GroupedPolicy = Field(GroupedPolicy.PROPORTIONAL, description="Of `grouped`.")
    within_source: Literal[SamplerKind.RANDOM, SamplerKind.NO_DUPLICATES] = Field(
        SamplerKind.RANDOM, description="How `grouped` fills the batches of one source."
    )

    @property
    def devices(self) -> int:
        """Devices whose rows are compared with each other."""
        return self.world_size if self.gather else 1


class LossOptions(Noun):
    """Which terms the loss compares, as in sentence-transformers' MultipleNegativesRankingLoss."""

    directions: tuple[Direction, ...] = (Direction.QUERY_TO_DOC,)
    partition_mode: PartitionMode = PartitionMode.JOINT
    train_group_size: int | None = Field(
        None,
        ge=1,
        description="Positive and hard negatives of a row together; 1 leaves hard negatives out."
        " Null: one more than every row has. A row with more brings a random choice, one with fewer repeats its own.",
    )


class ProbeRequest(Noun):
    """What to measure, on an already known corpus."""

    encoder: str | None = Field(
        None,
        description="A known encoder, a sentence-transformers model or a path; null: the service's default.",
    )
    corpus: CorpusOptions = CorpusOptions()
    batch_sizes: tuple[int, ...] | None = Field(
        None,
        description="Sizes N, each at least 2 and at most the usable rows; null: powers of two that fit.",
    )
    num_repeats: int = Field(
        DEFAULT_NUM_REPEATS, ge=2, le=100_000, description="Batches drawn for each size, at least."
    )
    top_k: int = Field(DEFAULT_TOP_K, ge=1, le=1000)
    temperature: float = Field(DEFAULT_TEMPERATURE, description="T; sentence-transformers' scale is 1/T.")
    seed: int = Field(0, ge=0, lt=2**63)
    sampler: SamplerOptions = SamplerOptions()
    loss: LossOptions = LossOptions()
    dropout_views: bool = Field(
        False,
        description="For sentences: take s_ii⁺ from two passes with dropout, which costs two more encodings."
        " Without it G, ξ and the effective anchors of sentences are null.",
    )
    method: Literal["auto", "sampled"] = Field(
        "auto",
        description="auto: figures that all pairs give exactly are exact where the whole corpus is encoded, for N up to"
        " a twentieth of its rows; sampled: all figures come from random batches, as in the paper.",
    )
    target_width: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="Encode rows only until the intervals of the similarity curve and of S are at most this wide at"
        " every batch size, which takes at least 20 times as many rows as the largest has.",
    )
    max_seconds: float | None = Field(
        None,
        gt=0.0,
        description="Stop encoding early enough to be done in about this many seconds; never before there are rows for"
        " the largest of `batch_sizes`.",
    )
    budget: Share = Field(DEFAULT_BUDGET, description="Largest acceptable false_negative_softmax_share.")
    training_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="In which the loss is computed; autocast computes it in float32."
    )
    worst_case_similarity: Cosine | None = Field(
        None,
        description="s₀: in the worst case every unjudged pair at least this similar is false."
        " Null: measured for the encoder on bundled same-meaning pairs.",
    )

    pairs_above: Cosine | None = Field(
        None,
        description="List every negative pair of the encoded rows that is at least this similar, up to 1,000,000 of them."
        " Null: the 1,000 most similar.",
    )

    @field_validator("batch_sizes")
    @classmethod
    def _sizes_sorted_once(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if sizes is None:
            return None
        if not sizes:
            raise ValueError("name at least one batch size")
        if min(sizes) < 2:
            raise ValueError(f"a batch needs at least 2 rows to have a negative, not {min(sizes)}")
        return tuple(sorted(set(sizes)))

    @field_validator("temperature")
    @classmethod
    def _temperature_positive(cls, temperature: float) -> float:
        if not 0.0 < temperature <= 100.0:
            raise ValueError(f"the temperature must be above 0 and at most 100, not {temperature}")
        return temperature


# ---------------------------------------------------------------------------------------------- the estimates


class Estimate(Noun):
    """A figure with its interval at the report's confidence level.

    ``low`` and ``high`` are null where no interval can be given honestly; ``method`` then says why.
    """

    value: float
    low: float | None
    high: float | None
    method: str

    @model_validator(mode="after")
    def _ordered(self) -> Estimate:
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has two ends or none")
        if self.low is not None and self.high is not None and not self.low <= self.value <= self.high:
            raise ValueError(f"value {self.value} lies outside its interval [{self.low}, {self.high}]")
        return self


class PairsAbove(Noun):
    """Negative pairs of one batch whose similarity is at least ``threshold``."""

    threshold: Cosine
    expected_pairs: Estimate = Field(description="Expected number of such pairs in a batch.")
    at_least_one: Estimate = Field(description="Probability that a batch has at least one, 0–1.")


class GaussianSimilarity(Noun):
    """Cosines of the rows of a batch to standard-normal vectors: the noise series of the paper's Figure 1."""

    mean: Estimate
    max: Estimate
    vectors_per_batch: int


class Xi(Noun):
    """Quantiles over anchors of ξ_i = Σ_{j≠i} exp((s_ij − s_ii⁺)/T)."""

    p10: Estimate
    p50: Estimate
    p90: Estimate


class GradientError(Noun):
    """How well one dtype computes the gradients with respect to the similarities, against float64."""

    infonce: Estimate = Field(description="Relative error of the InfoNCE gradient.")
    flatnce: Estimate = Field(description="Relative error of the FlatNCE gradient.")
    zero_loss_share: Estimate = Field(description="Share of anchors whose InfoNCE loss rounds to 0.")


class Nulls(Noun):
    """`top_k_mean` where the corpus brings no false negatives: a rising curve alone proves nothing."""

    gaussian_matched: Estimate | None = Field(
        description="Vectors drawn from a Gaussian with the corpus's own mean and covariance."
    )
    false_negatives_masked: Estimate | None = Field(
        description="The same batches with the known false-negative pairs masked; null where none is known."
    )
    isotropic: Estimate | None = Field(description="Directions drawn at random, as in the paper's footnote.")


class HardNegativeShares(Noun):
    """What falls to the rows' own hard negatives: a population of its own, never judged like random pairs."""

    own_push: Estimate = Field(description="Share of an anchor's push on its own row's hard negatives.")
    own_false: Estimate = Field(description="Share of the push on known false ones among them; part of S.")
    other_push: Estimate = Field(description="The same on other rows' hard negatives.")
    other_false: Estimate


class CurvePoint(Noun):
    """Everything measured at one batch size; each figure is an expectation over batches of the corpus."""

    batch_size: int = Field(description="N: rows that are compared with each other.")
    per_device_batch_size: int = Field(description="N / world_size where gathered, else N.")
    candidates_per_anchor: int = Field(description="Negatives in an anchor's softmax, hard ones included.")
    num_batches: int = Field(description="Batches behind the sampled figures.")
    negative_pairs_per_batch: int = Field(description="N(N−1)/2 for sentences, N(N−1) for pairs.")
    top_k: list[Estimate | None] = Field(
        description="Expected r-th largest similarity of all negative pairs, r = 1…k."
    )
    top_k_mean: Estimate | None = Field(
        description="Expected mean of those k; null if the batch has fewer pairs."
    )
    hardest_negative: Estimate = Field(description="Expected mean over anchors of the largest similarity.")
    pairs_above: list[PairsAbove]
    false_negatives_per_anchor: Estimate | None
    anchors_with_false_negative: Estimate | None = Field(description="P(an anchor has at least one), 0–1.")
    false_negative_softmax_share: Estimate | None = Field(
        description="S(N): share of each anchor's push on its negatives that lands on rows of equal meaning."
    )
    false_negative_gradient_share: Estimate | None = Field(
        description="G(N): the same share of an InfoNCE update; null where the positives have no similarity."
    )
    certain_share: Estimate | None = Field(
        None,
        description="S(N) from equal texts and listed positives alone: a lower bound that needs no labels.",
    )
    inferred_share: Estimate | None = Field(
        description="S(N) with the pairs counted that chains of known links join; null where chains add none."
    )
    borrowed_share: float | None = Field(
        description="A scenario without interval: S(N) if unjudged pairs followed a curve p(s) learnt elsewhere."
    )
    hard_negatives: HardNegativeShares | None = Field(
        description="Null where hard negatives are no candidates."
    )
    worst_case: Estimate | None = Field(
        description="S(N) if every unjudged pair with similarity ≥ s₀ were a false negative."
    )
    gaussian_similarity: GaussianSimilarity
    xi: Xi | None
    effective_anchors: Estimate | None = Field(description="(Σv)²/(N Σv²), 0–1.")
    effective_negatives: Estimate = Field(description="Mean over anchors of 1/Σ_j w_ij².")
    gradient_error: dict[str, GradientError] | None
    nulls: Nulls


class SharePoint(Noun):
    """S at one batch size of the scan over all integers."""

    batch_size: int
    estimate: Estimate
    worst_case: Estimate | None


class AuditedShare(Noun):
    """S at one batch size from the labels of an audit."""

    batch_size: int
    estimate: Estimate | None = Field(
        description="Null where the labels do not allow one; `reason` says why."
    )
    reason: str | None
    effective_labels: float = Field(description="What the labels are worth at this size: (Σw)²/Σw².")
    known_share: Share = Field(description="Share of the push on false negatives that needed no label.")
    unjudged_share: Share = Field(description="Share of the push on pairs that only the audit speaks of.")


class Histogram(Noun):
    """Similarities of random negative pairs of the corpus: expected counts in equal bins from −1 to 1."""

    bin_edges: list[float]
    all_pairs: list[int]
    known_false_negatives: list[int]
    pairs_counted: int


# ------------------------------------------------------------------------------------------------- the report


class ExcludedRows(Noun):
    """Rows left out for one reason, counted and listed."""

    reason: Literal["blank", "null", "not_a_string", "zero_vector", "non_finite_vector"]
    count: int
    rows: list[int] = Field(description="Row numbers from 1; the first 1,000.")


class DuplicateCounts(Noun):
    """Rows that repeat an earlier row, under ever looser equality."""

    exact: int = Field(description="Equal to an earlier row, byte for byte.")
    normalized: int = Field(description="Equal after NFC and white-space folding (includes exact).")
    case_folded: int = Field(description="Equal after case folding as well (includes normalized).")
    rows: list[int] = Field(description="Row numbers of the normalized repeats; the first 1,000.")


class TruncatedRows(Noun):
    """Rows that the tokenizer cuts at the encoder's maximum length."""

    count: int
    rows: list[int]
    collisions: int = Field(description="Rows equal to another only after the cut; not false negatives.")
    collision_rows: list[int]


class CorpusInfo(Noun):
    """What was read, what was left out, and what stayed."""

    sha256: str = Field(
        description="Content hash of the usable rows: texts, groups and sources, in file order."
    )
    name: str
    format: str
    kind: CorpusKind
    columns: ColumnRoles
    columns_inferred: bool
    rows_read: int
    rows_filtered_out: int = Field(description="Rows that `where` set aside.")
    rows_usable: int = Field(description="n: the rows that the figures speak of.")
    rows_encoded: int = Field(description="m ≤ n: the rows drawn and encoded.")
    excluded: list[ExcludedRows]
    duplicates: DuplicateCounts
    truncated: TruncatedRows | None
    groups: int | None = Field(description="Distinct groups, where a group column was read.")
    rows_without_group: int | None
    sources: dict[str, int] | None = Field(description="Usable rows by source.")
    hard_negatives: int | None = Field(description="Hard negatives of all usable rows, for tuples.")
    hard_negatives_left_out: int | None = Field(
        None, description="Hard negatives that are blank, null in a list, or not strings; their rows stay."
    )
    further_positives: int | None = Field(
        None,
        description="Usable positives beyond the first in lists of them; a row's first one is its positive.",
    )


class EncoderInfo(Noun):
    """Which encoder ran, from where, and how."""

    name: str
    backend: str
    location: str = Field(description="Hub name or path that the weights came from.")
    revision: str | None
    revision_pinned: bool
    weights_sha256: str | None
    pooling: str
    normalized: bool
    max_length: int | None = Field(description="Tokens.")
    dimension: int
    dtype: str
    device: str
    prompt: str | None
    check: str = Field(description="The check that the encoder passed at load.")
    fingerprint: str = Field(description="Key of the cache of vectors.")


class Chains(Noun):
    """Where chains of known links lead: rows that are joined by others, although nothing says that they mean the same."""

    components: int = Field(description="Sets of at least two rows that chains join.")
    largest_component_rows: int
    largest_component: list[int] = Field(description="Row numbers of the largest set; the first 1,000.")
    inferred_pairs: int = Field(description="Ordered pairs that chains join and nothing else judges.")


class EvidenceInfo(Noun):
    """What is known about which pairs are false negatives."""

    tier: Literal["certain", "labelled"]
    description: str
    known_false_negative_pairs: int = Field(
        description="Ordered pairs (anchor, candidate) among the encoded rows."
    )
    ordered_pairs: int
    unjudged_pair_share: Share = Field(description="Share of ordered pairs that nothing is known about.")
    worst_case_similarity: float | None
    worst_case_source: str
    chains: Chains | None = Field(description="Null where chains add no pair.")
    borrowed_source: str | None = Field(
        description="Where p(s) of the borrowed scenario comes from; null without it."
    )


class VerdictKind(StrEnum):
    """How a batch size stands against the budget."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class Verdict(Noun):
    """One batch size against the budget."""

    batch_size: int
    verdict: VerdictKind
    reason: str
    assumption: str | None = Field(None, description="What a pass rests on besides the rows themselves.")


class BatchSizeLimit(Noun):
    """n_max: the largest N whose upper limit keeps within the budget at every size tested up to N."""

    value: int | None = Field(description="null if even the smallest batch is above the budget.")
    per_device: int | None = Field(
        None,
        description="Rows of one device in such a batch; null where `value` is, or where it speaks of no training run.",
    )
    tested_up_to: int
    every_integer: bool = Field(
        True, description="Whether every integer from the smallest size on was tested, or a ladder of them."
    )
    exceeded: bool = Field(
        description="False: no tested size exceeded the budget, so n_max is at least `value`."
    )
    reason: str
    assumption: str | None = None


class DropEffect(Noun):
    """What dropping the repeated rows does, measured on batches of the remaining rows."""

    rows_to_drop: list[int] = Field(description="Row numbers; the first of each set of equal texts stays.")
    rows_remaining: int
    n_max_after: BatchSizeLimit | None
    share_after: list[SharePoint] = Field(description="S at the requested sizes that still fit.")
    snippet: str = Field(description="Python that drops them.")


class RemedyKind(StrEnum):
    """What may be changed."""

    NO_DUPLICATES = "no_duplicates"
    """Equal texts wait for another batch."""
    GROUP_AWARE = "group_aware"
    """Rows of one group never meet in a batch."""
    DROP_HARMFUL_ROWS = "drop_harmful_rows"
    """The rows that bring most of the harm are left out."""
    MASK = "mask"
    """The loss leaves out candidates that are about as similar as the positive, or more than a limit."""
    TEMPERATURE = "temperature"
    """Another temperature."""
    FLATNCE = "flatnce"
    """All anchors weigh the same."""
    GS_INFONCE = "gs_infonce"
    """Gaussian noise among the negatives."""


class Remedy(Noun):
    """Something to change, and what it does to S at one batch size."""

    kind: RemedyKind
    title: str
    batch_size: int
    share_before: Estimate
    share_after: Estimate | None = Field(
        description="Null where it leaves S as it is, or it was not measured."
    )
    n_max_after: BatchSizeLimit | None = Field(description="Null where only `share_after` was measured.")
    effect: str = Field(description="A sentence.")
    true_push_lost: Share | None = Field(
        description="Of the push on pairs not known to be false, the share that goes with it; null where none does."
    )
    rows: list[int] = Field(description="Row numbers to drop.")
    snippet: str | None = Field(description="Python to paste; null where there is none.")


class PaperRule(Noun):
    """The paper's rule, for comparison only: the largest size whose top_k_mean is at most a threshold."""

    threshold: float
    batch_size: int | None


class StarvationFloor(Noun):
    """The smallest batch whose InfoNCE gradient the training dtype computes well, there and at all larger sizes."""

    batch_size: int | None = Field(
        description="null if even the largest measured size starves; `tested_from` if none does."
    )
    dtype: str = Field(description="In which the loss is computed.")
    temperature: float
    positive_similarity: Cosine = Field(description="Mean s⁺ at which this holds.")
    positives: Literal["given", "dropout"] = Field(
        description="s⁺ is that of the corpus's pairs, or of two dropout passes."
    )
    largest_error: float = Field(description="Relative error of the gradient that was allowed.")
    tested_from: int
    tested_up_to: int
    reason: str
    remedies: list[str] = Field(description="Sentences; empty where no measured size starves.")


class Advice(Noun):
    """The safe window in numbers and in words."""

    budget: float
    budget_basis: str = Field(description="Where the budget is from, in words.")
    headline: str
    explanation: list[str] = Field(description="Sentences for a newcomer.")
    n_max: BatchSizeLimit
    verdicts: list[Verdict]
    drop_duplicates: DropEffect | None
    remedies: list[Remedy]
    starvation_floor: StarvationFloor | None = Field(
        description="The lower end of the window, advisory; null where the positives have no similarity."
    )
    trade_off: list[str] = Field(description="What a larger batch costs and what it brings, in sentences.")
    snippet: str | None = Field(
        description="Training arguments and loss at the largest safe batch; null where there is none."
    )
    paper_rule: list[PaperRule]


class SharesByTemperature(Noun):
    """S over batch sizes and temperatures, so that pages can draw it at another T without asking again."""

    temperatures: list[float]
    batch_sizes: list[int]
    share: list[list[Share]] = Field(description="S of the known pairs, one list for each temperature.")
    worst_case: list[list[Share]] | None = Field(description="Null where every pair is judged.")


class SourceCell(Noun):
    """What the anchors of one source push on the candidates of another."""

    anchor_source: str
    candidate_source: str
    push_share: Share = Field(description="Of all push.")
    false_push_share: Share = Field(description="Of all push, what is in this cell and on false negatives.")


class RowHarm(Noun):
    """What one row has to do with S."""

    row: int
    text: str | None
    source: str | None
    as_anchor: Share = Field(description="What it adds to S as an anchor.")
    as_candidate: Share = Field(description="The false push that it receives.")


class Harm(Noun):
    """Who brings the harm: S at one batch size, cut up exactly by source and by row."""

    batch_size: int
    share: Share
    sources: list[SourceCell] = Field(
        description="By (anchor's source, candidate's source); the false push sums to S."
    )
    rows_with_half: int = Field(
        description="Fewest rows that receive half of all false push; 0 where there is none."
    )
    rows: list[RowHarm] = Field(
        description="The rows that most false push goes to or comes from; the first 20."
    )


class ReportWarning(Noun):
    """Something that the reader should know before trusting a figure."""

    code: str
    message: str


class AuditLabels(Noun):
    """How the questions of an audit were answered."""

    pairs_drawn: int = Field(description="L: drawn pairs; the same texts may be drawn more than once.")
    questions: int = Field(description="Different pairs that were asked about.")
    yes: int
    no: int
    unsure: int
    repeats: int = Field(description="Questions that were asked twice.")
    repeats_answered_differently: int
    duplicates: int = Field(description="Hidden certain duplicates.")
    duplicates_accepted: int
    others: int = Field(description="Hidden certain non-duplicates.")
    others_accepted: int
    contradictions: list[str] = Field(
        description="Ids of hidden checks whose answer contradicts what is certain."
    )


class AuditReport(Noun):
    """What the labels of an audit say of S, for every batch size that it covers."""

    audit: str = Field(description="Id of the audit.")
    corpus_sha256: str
    encoder: str
    temperature: float
    confidence_level: float
    judges: list[str]
    labels: AuditLabels
    shares: list[AuditedShare]
    n_max: BatchSizeLimit | None = Field(
        description="Null where the audit does not cover every integer from 2."
    )
    verdicts: list[Verdict]
    warnings: list[ReportWarning]


class SimilarPair(Noun):
    """One of the most similar negative pairs of the encoded rows."""

    rank: int
    similarity: float
    row: int
    other_row: int
    text: str | None
    other_text: str | None
    known_false_negative: bool | None = Field(description="null: unjudged.")
    source: str | None
    other_source: str | None


class PairRecall(Noun):
    """How much of what is there a search through an index found, by rows drawn at random and compared with all others.

    Rows with equal vectors are one row here: no index is needed to find them.
    """

    rows: int = Field(description="Rows drawn.")
    nearest: Estimate = Field(description="Share of them whose most similar negative was found, 0–1.")
    rows_with_pairs: int = Field(description="Those of them that have a pair which ought to be listed.")
    pairs: int = Field(description="Such pairs of theirs.")
    pairs_listed: int = Field(description="Those of them that are listed.")
    listed: Estimate | None = Field(
        description="Mean over the rows that have such pairs of the share of theirs that are listed, 0–1; null if none has."
    )


class PairSearch(Noun):
    """How the most similar negative pairs were found, and what the list may lack."""

    index: Literal["flat", "ivf", "hnsw"] | None = Field(
        description="Kind of the FAISS index; null: without one, each row was compared with each."
    )
    rows: int = Field(description="Rows that were searched: all encoded ones.")
    at_least: Cosine | None = Field(
        description="Similarity that was asked for; null: the most similar pairs."
    )
    pairs: int = Field(description="Pairs in the list.")
    truncated: bool = Field(
        description="Whether more pairs than the list may hold have the similarity that was asked for; the most similar are"
        " listed."
    )
    recall: PairRecall | None = Field(description="Null: exact, nothing is missed.")
    description: str = Field(description="All this in words.")


class RunInfo(Noun):
    """Who ran this, where and when: the part of a report that differs from run to run."""

    id: str
    created_at: str
    finished_at: str
    host: str
    versions: dict[str, str]


class SamplerShortfall(Noun):
    """What one epoch of a sampler did not do with the rows; counts of rows and of devices' batches."""

    batch_size: int
    rows: int
    rows_left_out: int = Field(description="Rows in no batch of the epoch, for whatever reason.")
    rows_repeated: int = Field(description="Places that a row took for the second or third time.")
    remainder_rows: int = Field(description="Rows left over when batches are filled (drop_last).")
    rows_delayed: int = Field(description="Rows that met a duplicate and waited for a later batch.")
    short_batches: int
    batches_expected: int = Field(description="Batches that the sampler announces.")
    batches_resampled: int = Field(description="Batches that repeat rows to make up for those prevented.")
    batches_missing: int
    batches_not_dealt: int = Field(description="Full batches left over when every device needs one.")
    small_sources: list[str] = Field(description="Sources with too few rows for one full batch.")


class EarlyStop(Noun):
    """Why encoding stopped before all rows that were read, and drawn, for it."""

    reason: Literal["target_width", "max_seconds"]
    rows_left_out: int
    widest_interval: float | None = Field(
        description="Of the similarity curve and S over the batch sizes, when it stopped; null: not looked at."
    )
    description: str = Field(description="All this in words.")


class SamplingInfo(Noun):
    """How batches were drawn and intervals made."""

    method: Literal["exact", "sampled"]
    exact_up_to: int | None = Field(
        description="Largest N whose S, G, hardest negative and expected pairs come from all pairs, without batches."
    )
    sampler: SamplerKind
    shortfall: list[SamplerShortfall] = Field(
        description="What an epoch of each size leaves undone; empty for random batches."
    )
    confidence_level: float
    seed: int
    num_repeats: int
    top_k: int
    temperature: float
    sub_pools: int | None = Field(
        description="20 where a sample of rows was encoded; null for the whole corpus."
    )
    interval: str = Field(description="How intervals were made, in words.")
    largest_size_with_interval: int
    stopped: EarlyStop | None = Field(
        description="Why fewer rows were encoded than might have been; null where none of them were left out."
    )


class ProbeReport(Noun):
    """The result of one probe; equal vectors, request and seed: equal bytes but for `run` and `timings`."""

    schema_version: str = SCHEMA_VERSION
    run: RunInfo
    request: ProbeRequest
    corpus: CorpusInfo
    encoder: EncoderInfo
    evidence: EvidenceInfo
    sampling: SamplingInfo
    curve: list[CurvePoint]
    scan: list[SharePoint] = Field(
        description="S over all integers, thinned for drawing; n_max used every integer."
    )
    shares_by_temperature: SharesByTemperature | None = Field(
        description="Null where S does not come from all pairs."
    )
    harm: Harm | None = Field(description="Null where S does not come from all pairs.")
    histogram: Histogram
    pairs: list[SimilarPair] = Field(description="The most similar negative pairs; the first 20.")
    pair_search: PairSearch = Field(description="How they, and all that are listed, were found.")
    advice: Advice
    warnings: list[ReportWarning]
    timings: dict[str, float] = Field(description="Seconds by phase.")


# ------------------------------------------------------------------------------------------------------- jobs


class JobState(StrEnum):
    """The life of a job."""

    QUEUED = "queued"
    """Accepted; no worker has begun."""
    RUNNING = "running"
    """A worker has begun; after a crash it stays here until a worker takes it up again."""
    CANCELLING = "cancelling"
    """Asked to stop; the running step has not ended yet."""
    CANCELLED = "cancelled"
    """Stopped on request."""
    SUCCEEDED = "succeeded"
    """The report is there."""
    FAILED = "failed"
    """Ended with `error`."""

    @property
    def ended(self) -> bool:
        """Whether the job will not change any more."""
        return self in (JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED)


class Phase(StrEnum):
    """What a job is doing."""

    READING = "reading"
    LOADING = "loading"
    ENCODING = "encoding"
    MEASURING = "measuring"
    ADVISING = "advising"
    DRAWING = "drawing"
    """Pairs of an audit."""
    TUNING = "tuning"
    """The learning rates of a trial."""
    TRAINING = "training"
    """The cells of a trial."""


class Progress(Noun):
    """How far a job is."""

    phase: Phase
    fraction: Share = Field(description="Of the whole job; an estimate.")
    done: int
    total: int
    unit: str
    eta_seconds: float | None = None
    curve: list[CurvePoint] = Field(default_factory=list, description="The sizes measured so far.")
    curve_rows: int | None = Field(
        None,
        description="How many rows a provisional curve comes from, while more are being encoded: a random sample of"
        " them. Null: the curve is final.",
    )


class ProblemDetail(BaseModel):
    """An error as an RFC 9457 problem document, with the stable code and the row."""

    model_config = ConfigDict(extra="forbid")

    type: str
    title: str
    status: int
    detail: str
    code: str
    row: int | None = None
    column: str | None = None
    count: int | None = None
    instance: str | None = None


class Job(Noun):
    """A job as the API shows it."""

    id: str
    state: JobState
    corpus_id: str | None
    corpus_name: str
    created_at: str
    updated_at: str
    request: ProbeRequest
    progress: Progress | None
    attempts: int = Field(description="Times that a worker has begun it.")
    error: ProblemDetail | None
    links: dict[str, str]


class JobList(Noun):
    """Jobs, newest first."""

    jobs: list[Job]
    next_offset: int | None


class PairPage(Noun):
    """Some of the most similar negative pairs, most similar first."""

    pairs: list[SimilarPair]
    total: int
    next_offset: int | None


class ListedEncoder(Noun):
    """An encoder that requests may name."""

    name: str
    hub_name: str | None
    revision: str | None
    pooling: str | None
    max_length: int | None
    default: bool


class EncoderList(Noun):
    """The encoders that requests may name."""

    encoders: list[ListedEncoder]
    default: str | None = Field(description="null as long as no worker has said what it would take.")


class StoredCorpus(Noun):
    """Uploaded bytes, kept by their SHA-256."""

    id: str = Field(description="SHA-256 of the bytes as uploaded.")
    name: str
    size_bytes: int
    format: str
    created_at: str


class ProbeSubmission(Noun):
    """Body of ``POST /v1/probes``: exactly one of `rows`, `corpus_id` and `hf`, and the request."""

    rows: list[dict[str, Any] | str] | None = Field(None, description="Objects with columns, or plain texts.")
    corpus_id: str | None = None
    hf: str | None = Field(None, description="hf:NAME[:config[:split]][@revision]")
    name: str | None = None
    request: ProbeRequest = ProbeRequest()

    @model_validator(mode="after")
    def _one_corpus(self) -> ProbeSubmission:
        if sum(given is not None for given in (self.rows, self.corpus_id, self.hf)) != 1:
            raise ValueError("give exactly one of rows, corpus_id and hf")
        return self


# -------------------------------------------------------------------------------------------- the audit over HTTP

JudgeName = Annotated[str, Field(min_length=1, max_length=200)]


class AuditRequest(Noun):
    """Body of ``POST /v1/probes/{id}/audit``: how much is asked."""

    labels: int = Field(200, ge=2, le=5000, description="L, pairs to draw.")
    checks: int = Field(20, ge=0, le=500, description="Hidden checks of each kind, which measure the judge.")
    batch_size: int | None = Field(
        None,
        ge=2,
        description="Draw at this size alone; null: at all sizes of the probe at once, which needs random batches"
        " without hard negatives.",
    )
    judge: JudgeName = Field(
        "person", description="Whose earlier answers to pairs of the same texts are used again."
    )


class AuditCounts(Noun):
    """How far the labelling is; hidden checks and questions asked twice are counted like all others."""

    questions: int
    answered: int
    open: int


class AuditJob(Noun):
    """The audit of a probe as the API shows it."""

    id: str = Field(description="That of the probe, which has one audit at most.")
    state: JobState = Field(description="Of the drawing; labels are taken once it has succeeded.")
    created_at: str
    updated_at: str
    request: AuditRequest
    progress: Progress | None
    attempts: int = Field(description="Times that a worker has begun it.")
    error: ProblemDetail | None
    counts: AuditCounts | None = Field(description="null until the pairs are drawn.")
    links: dict[str, str]


class AuditQuestion(Noun):
    """Would `candidate` be accepted as a positive for `anchor`? Blind: a check looks like all others."""

    id: str
    number: int = Field(description="Place in the sheet, from 1; the order is random.")
    anchor: str
    positive: str | None = Field(description="The known positive of the anchor; null for sentences.")
    candidate: str
    answer: Literal["yes", "no", "unsure"] | None
    judge: str | None = Field(description="Who gave the answer.")


class AuditQuestionPage(Noun):
    """Some questions of an audit, in the order of the sheet."""

    questions: list[AuditQuestion]
    counts: AuditCounts
    next_offset: int | None = Field(description="Places of the sheet to skip for the questions after these.")


class AuditAnswer(Noun):
    """One entry of the list in ``POST …/audit/labels``."""

    id: str = Field(description="Of the question.")
    answer: Literal["yes", "no", "unsure"]
    judge: JudgeName = "person"


# ------------------------------------------------------------------------------------------------- the comparison


class FigureComparison(Noun):
    """One figure of two sides, and how far they are apart."""

    a: Estimate
    b: Estimate
    difference: Estimate = Field(description="B − A.")
    width_share: float | None = Field(
        description="Width of the difference's interval over that of independent batches; null where no common batches"
        " stand behind it."
    )


class ComparisonVerdict(StrEnum):
    """How S of B stands against S of A."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    """The whole interval rounds to a difference of .000."""
    UNDECIDED = "undecided"


class SizeComparison(Noun):
    """Both sides at one batch size."""

    batch_size: int
    num_batches: int = Field(description="Batches of each side behind the sampled figures.")
    figures: dict[str, FigureComparison] = Field(
        description="By the name of the field in CurvePoint, those that both sides have."
    )
    verdict: ComparisonVerdict
    statement: str = Field(description="The verdict in words.")


class CouplingKind(StrEnum):
    """How batches of A and of B were drawn."""

    SAME_ROWS = "same_rows"
    """Every encoded row is on both sides: the same batches."""
    COMMON_ROWS = "common_rows"
    """Batches that share the rows that both sides have."""
    FILE_ORDER = "file_order"
    """No row is on both sides, but there are equally many: those at the same places."""
    INDEPENDENT = "independent"
    """Drawn apart."""


class RowOverlap(Noun):
    """Which of the encoded rows both sides have."""

    matched_by: Literal["text", "id", "vector"] = Field(
        description="What makes two rows the same: normalised texts and their occurrence, the id, or equal vectors."
    )
    common: int
    only_a: int
    only_b: int
    coupling: CouplingKind
    explanation: str


class ComparedSide(Noun):
    """One side of a comparison."""

    request: ProbeRequest
    corpus: CorpusInfo
    encoder: EncoderInfo
    n_max: BatchSizeLimit | None = Field(description="null where too few rows are encoded for any interval.")


class ComparisonReport(Noun):
    """Two corpora, or one corpus under two encoders: every figure, and the difference with an interval."""

    schema_version: str = SCHEMA_VERSION
    a: ComparedSide
    b: ComparedSide
    confidence_level: float
    rows: RowOverlap
    sizes: list[SizeComparison]
    headline: str
    warnings: list[ReportWarning]


# ------------------------------------------------------------------------------------------------------ the trial


class TrialMode(StrEnum):
    """What a trial trains."""

    HEAD = "head"
    """A linear or MLP head on the encoder's frozen vectors."""
    FULL = "full"
    """The whole encoder: pairs, or sentences whose positive is themselves under another dropout."""
    IMAGES = "images"
    """A small CNN on two views of scikit-learn's digits; needs no corpus."""


class TrialLossKind(StrEnum):
    """A loss to try (docs/losses.md)."""

    INFONCE = "infonce"
    GS_INFONCE = "gs_infonce"
    GS_INFONCE_CONTROL = "gs_infonce_control"
    """GS-InfoNCE with the expected value of the noise in its place."""
    FLATNCE = "flatnce"
    ORACLE_MASKING = "oracle_masking"
    """InfoNCE without the known false negatives: what it gains over InfoNCE is the harm that they do."""


class TrialLoss(Noun):
    """One of the losses that a trial compares."""

    kind: TrialLossKind
    noise_per_anchor: float = Field(
        3.0, gt=0, le=64, description="M / N of GS-InfoNCE and its control; the paper takes 3."
    )

    @property
    def name(self) -> str:
        """Tells the losses of a trial apart; with M / N where that is not the paper's."""
        return self.kind if self.noise_per_anchor == 3.0 else f"{self.kind}_x{self.noise_per_anchor:g}"


class TrialRequest(Noun):
    """What to try: every loss at every batch size and temperature, with every seed."""

    mode: TrialMode = TrialMode.HEAD
    encoder: str | None = Field(None, description="As in ProbeRequest: what is frozen, or trained on.")
    corpus: CorpusOptions = CorpusOptions()
    held_out_where: dict[str, str] = Field(
        default_factory=dict,
        description="Evaluate on the rows whose column has this value, e.g. {'split': 'test'}, read with the options of"
        " `corpus` but for its own `where`. Empty: hold out a share of the groups, or of the pairs.",
    )
    held_out_share: float = Field(
        0.2, gt=0, lt=1, description="Of the rows; without effect where held_out_where is given."
    )
    losses: tuple[TrialLoss, ...] | None = Field(
        None,
        description="Null: all five, for images infonce and flatnce; oracle_masking only where false negatives are known.",
    )
    batch_sizes: tuple[int, ...] | None = Field(None, description="Null: those of the mode that fit.")
    temperatures: tuple[float, ...] | None = Field(None, description="Null: that of the mode.")
    num_seeds: int = Field(5, ge=1, le=100, description="Runs of each loss, batch size and temperature.")
    steps: int | None = Field(
        None, ge=1, description="Optimisation steps of every cell: arms that take equally many are compared."
    )
    examples: int | None = Field(
        None, ge=1, description="Instead of steps: anchors that every cell sees, examples / N steps of N."
    )
    learning_rates: tuple[float, ...] | None = Field(
        None,
        description="Each loss takes the best of these, found on rows of its own with one seed, at the smallest and at the"
        " largest batch; sizes between go between in proportion to log N. One alone is not tuned. Null: three of the mode.",
    )
    head: Literal["linear", "mlp"] = Field("linear", description="Of the mode `head`.")
    head_width: int = Field(128, ge=2, le=4096, description="Length of the vectors that the head gives.")
    max_length: int | None = Field(
        None,
        ge=4,
        le=8192,
        description="Of the mode `full`: tokens of a text in training. Null: 32 for sentences, else the encoder's own.",
    )
    recall_at: int = Field(10, ge=1, le=1000, description="k of recall@k.")
    seed: int = Field(0, ge=0, lt=2**63)

    @field_validator("batch_sizes")
    @classmethod
    def _sizes_sorted_once(cls, sizes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return ProbeRequest._sizes_sorted_once(sizes)

    @field_validator("temperatures", "learning_rates")
    @classmethod
    def _positive_sorted_once(cls, values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if values is None:
            return None
        if not values or not all(0.0 < value <= 100.0 for value in values):
            raise ValueError("give at least one, each above 0 and at most 100")
        return tuple(sorted(set(values)))

    @model_validator(mode="after")
    def _consistent(self) -> TrialRequest:
        if self.steps is not None and self.examples is not None:
            raise ValueError("give steps or examples, not both")
        if self.losses is not None and len({loss.name for loss in self.losses}) < max(1, len(self.losses)):
            raise ValueError("name at least one loss, and each once")
        return self


class TrialCurvePoint(Noun):
    """One point of a learning curve."""

    step: int
    loss: float = Field(description="Mean of the training loss since the point before.")
    score: float = Field(description="The trial's metric, as stated in the report.")


class TrialCell(Noun):
    """One training run."""

    loss: str = Field(description="Name of the loss, with M / N where that is not 3.")
    batch_size: int
    temperature: float
    seed: int = Field(description="From 0; cells of one seed and batch size see the same batches.")
    learning_rate: float
    steps: int
    examples: int = Field(description="steps × N.")
    scores: dict[str, float] = Field(description="Metrics on the held-out rows, by name.")
    curve: list[TrialCurvePoint]


class TrialFigure(Noun):
    """What a loss reaches at one batch size and temperature: means over the seeds that have finished."""

    loss: str
    batch_size: int
    temperature: float
    learning_rate: float
    num_seeds: int
    scores: dict[str, Estimate]


class MaskingGain(Noun):
    """What the known false negatives cost at one batch size and temperature, and what the probe predicts."""

    batch_size: int
    temperature: float
    predicted_share: Estimate | None = Field(
        description="S(N) of the training rows before training; null where it is not known."
    )
    gain: Estimate = Field(description="Metric of oracle_masking less that of infonce, paired by seed.")


class TunedRate(Noun):
    """How a learning rate was chosen."""

    loss: str
    batch_size: int
    temperature: float
    scores: dict[str, float] = Field(description="Metric on the tuning rows by learning rate.")
    chosen: float


class HeldOutRows(Noun):
    """What a trial is evaluated on."""

    description: str
    rows: int
    queries: int = Field(description="Rows for which a right answer is among the candidates.")
    queries_left_out: int


class TrialReport(Noun):
    """The result of a trial; before all cells have finished, what is known so far."""

    schema_version: str = SCHEMA_VERSION
    request: TrialRequest
    complete: bool = Field(description="Whether every cell has finished.")
    num_cells: int = Field(description="Cells of the whole trial.")
    corpus: CorpusInfo | None = Field(description="Null for images.")
    encoder: EncoderInfo | None
    training_rows: int
    training_rows_left_out: int = Field(description="Rows without a positive: no group, or alone in it.")
    held_out: HeldOutRows
    protocol: list[str] = Field(description="What was kept equal and how it was trained, in sentences.")
    metric: str = Field(description="The score that tuning, gains and learning curves speak of.")
    before: dict[str, float] = Field(description="The scores without training.")
    tuned: list[TunedRate]
    table: list[TrialFigure]
    masking: list[MaskingGain] = Field(description="Empty unless infonce and oracle_masking were both tried.")
    rank_correlation: float | None = Field(
        description="Spearman's, of predicted share with gain over `masking`; null below three points."
    )
    cells: list[TrialCell]
    warnings: list[ReportWarning]


class TrialSubmission(Noun):
    """Body of ``POST /v1/trials``: a stored corpus or a Hugging Face data set, none for images, and the request."""

    corpus_id: str | None = Field(None, description="Of ``POST /v1/corpora``.")
    hf: str | None = Field(None, description="hf:NAME[:config[:split]][@revision]")
    name: str | None = Field(None, description="Of the corpus, in the report.")
    request: TrialRequest = TrialRequest()

    @model_validator(mode="after")
    def _its_corpus(self) -> TrialSubmission:
        given = sum(each is not None for each in (self.corpus_id, self.hf))
        if given != (self.request.mode is not TrialMode.IMAGES):
            raise ValueError("give exactly one of corpus_id and hf, or neither for images")
        return self


class TrialJob(Noun):
    """A trial as the API shows it."""

    id: str
    state: JobState
    corpus_id: str | None
    corpus_name: str
    created_at: str
    updated_at: str
    request: TrialRequest
    progress: Progress | None
    attempts: int = Field(description="Times that a worker has begun it.")
    error: ProblemDetail | None
    table: list[TrialFigure] = Field(
        description="What is known so far: means over the cells that have finished."
    )
    links: dict[str, str]


class TrialJobList(Noun):
    """Trials, newest first; without their tables."""

    trials: list[TrialJob]
    next_offset: int | None
