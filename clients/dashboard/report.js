// A finished report as elements, and the table of a curve, finished or not.

import { count, estimate, fill, h, plural, sentence, share } from "./dom.js";
import { getBlob, getJson, hasKey } from "./api.js";

const ROWS_SHOWN = 60;
const PAIRS_FIRST = 6;
const PAIRS_PAGE = 20;

const VERDICTS = {
  pass: { mark: "✓", word: "safe" },
  fail: { mark: "✕", word: "too big" },
  inconclusive: { mark: "?", word: "not decided" },
};

const EXCLUSIONS = {
  blank: "blank",
  null: "null",
  not_a_string: "not a text",
  zero_vector: "zero vector",
  non_finite_vector: "vector with a value that is not finite",
};

export function verdictChip(kind) {
  const { mark, word } = VERDICTS[kind];
  return h("span", { class: `chip ${kind}` }, h("span", { "aria-hidden": "true" }, mark), ` ${word}`);
}

const list = (items, attributes = {}) => h("ul", attributes, ...items.map((item) => h("li", {}, item)));

export const card = (title, ...children) => h("section", { class: "card" }, h("h2", {}, title), ...children);

// ------------------------------------------------------------------------------------------------ the headline

/** The answer: the largest safe size, how sure, and the verdict of each size asked for. */
export function verdictSection(report) {
  const { advice } = report;
  const limit = advice.n_max;
  return h(
    "section",
    { class: "card hero", "aria-labelledby": "verdict-title" },
    h(
      "div",
      { class: "answer" },
      h("p", { class: "answer-figure", "data-n-max": limit.value ?? "none" }, limitInFigures(limit)),
      h("p", { class: "hint" }, "largest batch size shown to be safe"),
    ),
    h(
      "div",
      { class: "reasons" },
      h("h2", { id: "verdict-title" }, advice.headline),
      ...advice.explanation.map((sentence) => h("p", {}, sentence)),
      h("h3", {}, "How sure"),
      h("p", {}, sentence(limit.reason)),
      limit.assumption && h("p", {}, h("strong", {}, "Assumes: "), sentence(limit.assumption)),
      h(
        "p",
        { class: "hint" },
        `Intervals are at ${report.sampling.confidence_level}. Evidence: ${report.evidence.tier}. `,
        `Budget ${share(advice.budget)}${advice.budget_is_provisional ? " (provisional)" : ""}.`,
      ),
    ),
    verdictList(advice.verdicts),
  );
}

export function verdictList(verdicts) {
  return h(
    "ul",
    { class: "verdicts", "aria-label": "Verdict for each batch size" },
    ...verdicts.map((verdict) =>
      h(
        "li",
        { class: verdict.verdict },
        h("span", { class: "size" }, count(verdict.batch_size)),
        verdictChip(verdict.verdict),
        h("span", { class: "why" }, sentence(verdict.reason)),
        verdict.assumption && h("span", { class: "why" }, `Assumes: ${sentence(verdict.assumption)}`),
      ),
    ),
  );
}

/** The way to an audit, where there is something to ask and a text to show. */
export function auditSection(report, jobId) {
  const unjudged = report.evidence.unjudged_pair_share;
  if (unjudged === 0 || report.pairs.every((pair) => pair.text === null)) return null;
  return card(
    "Be surer with labels",
    h(
      "p",
      {},
      unjudged > 0.999 ? "Hardly any pair of rows is judged. " : `A share of ${share(unjudged)} of all pairs of rows is not judged. `,
      "A few hundred labels give S with an interval at every batch size, whatever the encoder finds similar.",
    ),
    h("a", { class: "button primary", href: `#/probes/${encodeURIComponent(jobId)}/audit` }, "Audit with labels"),
  );
}

/** Links to the same result in other forms. */
export function linksSection(jobId) {
  const link = (text, end, name) => resultLink(text, `/v1/probes/${encodeURIComponent(jobId)}/${end}`, name);
  return h(
    "nav",
    { class: "actions links", "aria-label": "This report in other forms" },
    link("Report as a page", "report.html", "report.html"),
    link("JSON", "report", "report.json"),
    link("Chart as SVG", "chart.svg", "chart.svg"),
    link("Chart as PNG", "chart.png", "chart.png"),
  );
}

/** A link to a result. A plain one sends no key, so with a key the file is fetched and then saved. */
export function resultLink(text, path, name) {
  return h(
    "a",
    {
      class: "button",
      href: path,
      target: "_blank",
      rel: "noopener",
      click: hasKey() ? (event) => download(event, path, name) : null,
    },
    text,
  );
}

async function download(event, path, name) {
  event.preventDefault();
  save(await getBlob(path), name);
}

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

// ------------------------------------------------------------------------------------------------ the curve

/** The curve in figures; verdicts only once there are any. */
export function curveTable(curve, verdicts = []) {
  const verdictOf = new Map(verdicts.map((verdict) => [verdict.batch_size, verdict.verdict]));
  const columns = [
    ["Batch size", (point) => count(point.batch_size)],
    verdictOf.size
      ? ["Verdict", (point) => (verdictOf.has(point.batch_size) ? verdictChip(verdictOf.get(point.batch_size)) : "–")]
      : null,
    ["Push on same-meaning rows, S", (point) => estimate(point.false_negative_softmax_share)],
    ["False negatives per anchor", (point) => estimate(point.false_negatives_per_anchor)],
    ["Anchors with at least one", (point) => estimate(point.anchors_with_false_negative)],
    ["Mean of the top similarities", (point) => estimate(point.top_k_mean)],
    ["Hardest negative of an anchor", (point) => estimate(point.hardest_negative)],
  ].filter((column) => column !== null);
  return figuresTable("Table of the curve", columns, curve);
}

/** A table that scrolls by itself where it is too wide: columns are [title, cell of a row]; the first one heads its row. */
export function figuresTable(label, columns, rows) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      { class: "figures" },
      h("thead", {}, h("tr", {}, ...columns.map(([title]) => h("th", { scope: "col" }, title)))),
      h(
        "tbody",
        {},
        ...rows.map((row) =>
          h(
            "tr",
            {},
            ...columns.map(([, cell], index) => (index === 0 ? h("th", { scope: "row" }, cell(row)) : h("td", {}, cell(row)))),
          ),
        ),
      ),
    ),
  );
}

export function curveSection(report) {
  return card(
    "In figures",
    h("p", { class: "hint" }, "Each figure is an expectation over batches of this corpus; its interval stands in brackets."),
    curveTable(report.curve, report.advice.verdicts),
  );
}

// ------------------------------------------------------------------------------------------------ what to change

export function duplicatesSection(report) {
  const drop = report.advice.drop_duplicates;
  const found = report.corpus.duplicates;
  if (!drop || drop.rows_to_drop.length === 0) {
    return card("Rows to drop", h("p", { class: "empty" }, "No text comes twice; there is nothing to drop."));
  }
  const shown = drop.rows_to_drop.slice(0, ROWS_SHOWN);
  const more = drop.rows_to_drop.length - shown.length;
  const after = drop.n_max_after;
  const now = report.advice.n_max.value;
  return card(
    "Rows to drop",
    h(
      "p",
      {},
      `${plural(drop.rows_to_drop.length, "row repeats", "rows repeat")} an earlier row `,
      `(${count(found.exact)} byte for byte). ${plural(drop.rows_remaining, "row stays", "rows stay")}.`,
      after ? ` Without them the largest safe size is ${limitInWords(after)} instead of ${now === null ? "none" : count(now)}.` : "",
    ),
    h("p", { class: "rows" }, shown.join(", "), more > 0 ? ` … and ${count(more)} more` : ""),
    h(
      "button",
      {
        type: "button",
        click: () => save(new Blob([`${drop.rows_to_drop.join("\n")}\n`], { type: "text/plain" }), "rows-to-drop.txt"),
      },
      "Save the row numbers",
    ),
  );
}

function limitInWords(limit) {
  if (limit.value === null) return "none";
  return limit.exceeded ? count(limit.value) : `at least ${count(limit.value)}`;
}

/** n_max as the large figure of a page. */
export function limitInFigures(limit) {
  if (limit.value === null) return "none";
  return limit.exceeded ? count(limit.value) : `≥ ${count(limit.value)}`;
}

function pairItem(pair) {
  const known = { true: "same meaning", false: "judged different", null: "not judged" }[String(pair.known_false_negative)];
  const side = (row, text, source) =>
    h(
      "div",
      { class: "pair-side" },
      h("span", { class: "hint" }, `row ${count(row)}${source ? ` · ${source}` : ""}`),
      // A corpus may hold anything: shown as text only, in its own direction.
      h("p", { dir: "auto" }, text ?? "(no text)"),
    );
  return h(
    "li",
    {},
    h(
      "div",
      { class: "pair-head" },
      h("strong", {}, pair.similarity.toFixed(3)),
      h("span", { class: `chip ${pair.known_false_negative ? "fail" : ""}` }, known),
    ),
    side(pair.row, pair.text, pair.source),
    side(pair.other_row, pair.other_text, pair.other_source),
  );
}

export function pairsSection(report, jobId) {
  if (report.pairs.length === 0) {
    return card("Most similar pairs", h("p", { class: "empty" }, "There is no pair to show."));
  }
  const items = h("ol", { class: "pairs" }, ...report.pairs.slice(0, PAIRS_FIRST).map(pairItem));
  const note = h("p", { class: "hint", role: "status" });
  let offset = Math.min(PAIRS_FIRST, report.pairs.length);
  const more = h("button", { type: "button" }, "Show more");
  more.addEventListener("click", async () => {
    more.disabled = true;
    try {
      const page = await getJson(`/v1/probes/${encodeURIComponent(jobId)}/pairs?offset=${offset}&limit=${PAIRS_PAGE}`);
      items.append(...page.pairs.map(pairItem));
      offset += page.pairs.length;
      note.textContent = `${count(offset)} pairs shown.`;
      more.hidden = page.next_offset === null;
    } catch (error) {
      note.textContent = `The next pairs could not be fetched: ${error.message}`;
    }
    more.disabled = false;
  });
  return card(
    "Most similar pairs",
    h("p", { class: "hint" }, "Rows that would meet as negatives although they are this similar. Do they mean the same?"),
    items,
    h("div", { class: "actions" }, more, note),
  );
}

// ------------------------------------------------------------------------------------------------ what was read

export function warningsSection(report) {
  if (report.warnings.length === 0) return null;
  return card(
    "Mind",
    list(
      report.warnings.map((warning) => [warning.message, " ", h("code", {}, warning.code)]),
      { class: "warnings" },
    ),
  );
}

export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    ...pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

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
      ["Worst case", evidence.worst_case_similarity === null ? null : `from ${share(evidence.worst_case_similarity)}: ${evidence.worst_case_source}`],
      ["Intervals", sampling.interval],
      ["Temperature", String(sampling.temperature)],
      ["Batches for each size, at least", count(sampling.num_repeats)],
      ["Seed", String(sampling.seed)],
      ["Seconds", Object.entries(report.timings).map(([phase, seconds]) => `${phase} ${seconds.toFixed(1)}`).join(", ")],
    ]),
  );
}

/** A problem in words: what was wrong, where, its code. */
export function problemBox(problem, ...actions) {
  const box = h("div", { class: "problem", role: "alert" });
  fill(box, ...problemLines(problem), actions.length ? h("div", { class: "actions" }, ...actions) : null);
  return box;
}

export function problemLines(problem) {
  const where = [
    problem.row === null || problem.row === undefined ? null : `First bad row: ${problem.row}`,
    problem.column ? `Column or field: ${problem.column}` : null,
    problem.count === null || problem.count === undefined ? null : `Found ${plural(problem.count, "time", "times")}`,
  ].filter((part) => part !== null);
  return [
    h("p", { class: "problem-title" }, problem.message ?? problem.detail),
    where.length ? h("p", {}, where.join(" · ")) : null,
    problem.code ? h("p", { class: "hint" }, "Code ", h("code", {}, problem.code)) : null,
  ];
}
