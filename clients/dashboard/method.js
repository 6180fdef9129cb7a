// What was read, with which encoder, on which evidence, and how batches were drawn.

import { count, h, plural, sentence, share } from "./dom.js";
import { facts, figuresTable, list } from "./report.js";

const EXCLUSIONS = {
  blank: "blank",
  null: "null",
  not_a_string: "not a text",
  zero_vector: "zero vector",
  non_finite_vector: "vector with a value that is not finite",
};

const SHORTFALLS = {
  rows_left_out: "Rows left out",
  rows_repeated: "Places of rows that repeat",
  remainder_rows: "Of the rest that fills no batch",
  rows_delayed: "Rows that waited",
  short_batches: "Batches that are short",
  batches_expected: "Batches announced",
  batches_resampled: "Of them with repeated rows",
  batches_missing: "Of them missing",
  batches_not_dealt: "Batches too few for all devices",
  small_sources: "Sources without a full batch",
};

const DIRECTIONS = {
  query_to_doc: "each anchor with every document",
  query_to_query: "each anchor with every other anchor",
  doc_to_query: "each positive with every anchor",
  doc_to_doc: "each positive with every document of another row",
};

export function factsSection(report) {
  const { corpus, encoder, evidence, sampling } = report;
  const excluded = corpus.excluded.filter((kind) => kind.count > 0);
  const roles = Object.entries(corpus.columns)
    .filter(([, column]) => column && column.length)
    .map(([role, column]) => `${role}: ${Array.isArray(column) ? column.join(", ") : column}`);
  return h(
    "details",
    { class: "card" },
    h("summary", {}, h("h2", {}, "What was read, and how")),
    h("h3", {}, "Corpus"),
    facts([
      ["Rows read", count(corpus.rows_read)],
      ["Set aside by a filter", corpus.rows_filtered_out ? count(corpus.rows_filtered_out) : null],
      ["Usable", count(corpus.rows_usable)],
      ["Encoded", count(corpus.rows_encoded)],
      [
        "Left out",
        excluded.length
          ? list(
              excluded.map(
                (kind) =>
                  `${EXCLUSIONS[kind.reason]}: ${plural(kind.count, "row", "rows")} (${kind.rows.slice(0, 10).join(", ")}${
                    kind.count > 10 ? ", …" : ""
                  })`,
              ),
            )
          : "none",
      ],
      [
        "Cut by the tokenizer",
        corpus.truncated && corpus.truncated.count
          ? `${plural(corpus.truncated.count, "row", "rows")} (${corpus.truncated.rows.slice(0, 10).join(", ")}${corpus.truncated.count > 10 ? ", …" : ""})`
          : null,
      ],
      ["Format and kind", `${corpus.format}, ${corpus.kind}`],
      ["Columns", roles.length ? `${roles.join("; ")}${corpus.columns_inferred ? " (found by name)" : ""}` : null],
      ["Groups", corpus.groups === null ? null : count(corpus.groups)],
      [
        "Sources",
        corpus.sources &&
          Object.entries(corpus.sources)
            .map(([source, rows]) => `${source}: ${count(rows)}`)
            .join("; "),
      ],
      ["Hard negatives", corpus.hard_negatives === null ? null : count(corpus.hard_negatives)],
      ["SHA-256", h("code", {}, corpus.sha256)],
    ]),
    h("h3", {}, "Encoder"),
    facts([
      ["Name", encoder.name],
      ["Weights from", encoder.location],
      ["Revision", encoder.revision ? h("code", {}, encoder.revision) : "unknown"],
      ["Pooling", encoder.pooling],
      ["Vectors", `${encoder.dimension} numbers, ${encoder.dtype}, on ${encoder.device}`],
      ["Check at load", encoder.check],
    ]),
    h("h3", {}, "Evidence and sampling"),
    facts([
      ["Evidence", evidence.description],
      ["Known false-negative pairs", `${count(evidence.known_false_negative_pairs)} of ${count(evidence.ordered_pairs)}`],
      ["Share of pairs not judged", share(evidence.unjudged_pair_share)],
      ...furtherEvidence(evidence),
      ["Worst case", evidence.worst_case_similarity === null ? null : `from ${share(evidence.worst_case_similarity)}: ${evidence.worst_case_source}`],
      ["Stopped", sampling.stopped && sampling.stopped.description],
      ["Intervals", sampling.interval],
      ...samplerFacts(report),
      ["Temperature", String(sampling.temperature)],
      ["Batches for each size, at least", count(sampling.num_repeats)],
      ["Seed", String(sampling.seed)],
      ["Seconds", Object.entries(report.timings).map(([phase, seconds]) => `${phase} ${seconds.toFixed(1)}`).join(", ")],
    ]),
    ...shortfallTable(report),
  );
}

/** How batches are put together and what the loss compares, as facts. */
function samplerFacts(report) {
  const { sampler, loss } = report.request;
  const bySize = (field) => report.curve.map((point) => `${count(point[field])} at N = ${count(point.batch_size)}`).join(", ");
  const grouped = sampler.kind === "grouped" ? `, sources ${sampler.policy.replaceAll("_", " ")}, ${sampler.within_source.replaceAll("_", " ")} within` : "";
  const apart = loss.partition_mode === "per_direction" && loss.directions.length > 1;
  return [
    ["Sampler", `${sampler.kind}${grouped}`],
    ["Devices", sampler.world_size > 1 ? `${count(sampler.world_size)}; the loss compares ${sampler.gather ? "the rows of all" : "those of each alone"}` : null],
    ["Rows of one device", sampler.world_size > 1 ? bySize("per_device_batch_size") : null],
    ["The loss compares", `${loss.directions.map((direction) => DIRECTIONS[direction]).join(" and ")}${apart ? ", each in a softmax of its own" : ""}`],
    ["Negatives of an anchor", bySize("candidates_per_anchor")],
  ];
}

/** What one epoch of the sampler leaves undone: a column for each kind that occurs. */
function shortfallTable(report) {
  const { shortfall } = report.sampling;
  if (shortfall.length === 0) return [];
  const occurs = (value) => (Array.isArray(value) ? value.length > 0 : value > 0);
  const columns = Object.entries(SHORTFALLS)
    .filter(([field]) => shortfall.some((each) => occurs(each[field])))
    .map(([field, title]) => [title, ({ [field]: value }) => (Array.isArray(value) ? value.join(", ") || "none" : count(value))]);
  return [
    h("h3", {}, "What one epoch of the sampler leaves undone"),
    figuresTable("Shortfall of the sampler", [["Batch size", (each) => count(each.batch_size)], ...columns], shortfall),
  ];
}

/** Evidence that decides nothing: chains of known links, and a curve learnt elsewhere. */
function furtherEvidence({ chains, borrowed_source: borrowed }) {
  return [
    [
      "Chains of known links",
      chains &&
        `join ${count(chains.inferred_pairs)} pairs that nothing else judges, in ${plural(chains.components, "set", "sets")} of rows, the largest of ${plural(chains.largest_component_rows, "row", "rows")}; drawn apart, they decide nothing`,
    ],
    ["Scenario", borrowed && sentence(`S if unjudged pairs were as pairs are elsewhere (${borrowed}); it has no interval and decides nothing`)],
  ];
}
