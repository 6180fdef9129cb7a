// A finished report as elements, and the table of a curve, finished or not.

import { count, estimate, fill, h, plural, sentence, share } from "./dom.js";
import { getBlob, getJson, hasKey } from "./api.js";

const PAIRS_FIRST = 6;
const PAIRS_PAGE = 20;

const VERDICTS = {
  pass: { mark: "✓", word: "safe" },
  fail: { mark: "✕", word: "too big" },
  inconclusive: { mark: "?", word: "not decided" },
};

export function verdictChip(kind) {
  const { mark, word } = VERDICTS[kind];
  return h("span", { class: `chip ${kind}` }, h("span", { "aria-hidden": "true" }, mark), ` ${word}`);
}

export const list = (items, attributes = {}) => h("ul", attributes, ...items.map((item) => h("li", {}, item)));

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
      limit.per_device !== null && report.request.sampler.world_size > 1
        ? h("p", {}, `${count(limit.per_device)} a device on ${count(report.request.sampler.world_size)} devices`)
        : null,
      report.sampling.sampler === "random" ? null : h("p", { class: "hint" }, `batches as ${report.sampling.sampler} draws them`),
    ),
    h(
      "div",
      { class: "reasons" },
      h("h2", { id: "verdict-title" }, advice.headline),
      ...advice.explanation.map((sentence) => h("p", {}, sentence)),
      h("h3", {}, "How sure"),
      h("p", {}, sentence(limit.reason), limit.every_integer ? "" : " Not every integer was tested, but a ladder of sizes."),
      limit.assumption && h("p", {}, h("strong", {}, "Assumes: "), sentence(limit.assumption)),
      h(
        "p",
        { class: "hint" },
        `Intervals are at ${report.sampling.confidence_level}. Evidence: ${report.evidence.tier}. `,
        `Budget ${share(advice.budget)} (${advice.budget_basis}).`,
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

/** Offer a file made here. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

// ------------------------------------------------------------------------------------------------ the curve

/** The curve in figures; verdicts only once there are any. */
export function curveTable(curve, verdicts = []) {
  const verdictOf = new Map(verdicts.map((verdict) => [verdict.batch_size, verdict.verdict]));
  const known = (field) => curve.length > 0 && curve.every((point) => point[field] !== null);
  const columns = [
    ["Batch size", (point) => count(point.batch_size)],
    verdictOf.size
      ? ["Verdict", (point) => (verdictOf.has(point.batch_size) ? verdictChip(verdictOf.get(point.batch_size)) : "–")]
      : null,
    ["Push on same-meaning rows, S", (point) => estimate(point.false_negative_softmax_share)],
    known("inferred_share") && ["S with chains of known links", (point) => estimate(point.inferred_share)],
    known("borrowed_share") && ["Scenario, no estimate", (point) => share(point.borrowed_share)],
    ["False negatives per anchor", (point) => estimate(point.false_negatives_per_anchor)],
    ["Anchors with at least one", (point) => estimate(point.anchors_with_false_negative)],
    ["Mean of the top similarities", (point) => estimate(point.top_k_mean)],
    ["Hardest negative of an anchor", (point) => estimate(point.hardest_negative)],
  ].filter(Boolean);
  return figuresTable("Table of the curve", columns, curve);
}

/**
 * A table that scrolls by itself where it is too wide: columns are [title, cell of a row]; the first one heads its row.
 * One of the kind "stacked" has text in its first column, and on a narrow screen its figures stand below that.
 */
export function figuresTable(label, columns, rows, kind = "") {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h(
      "table",
      { class: `figures ${kind}` },
      h("thead", {}, h("tr", {}, ...columns.map(([title]) => h("th", { scope: "col" }, title)))),
      h(
        "tbody",
        {},
        ...rows.map((row) =>
          h(
            "tr",
            {},
            ...columns.map(([title, cell], index) =>
              index === 0 ? h("th", { scope: "row" }, cell(row)) : h("td", { "data-name": title }, cell(row)),
            ),
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

/** n_max as the large figure of a page. */
export function limitInFigures(limit) {
  if (limit.value === null) return "none";
  return limit.exceeded ? count(limit.value) : `≥ ${count(limit.value)}`;
}

// ------------------------------------------------------------------------------------------------ the pairs

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
  const search = h("p", { class: "hint" }, report.pair_search.description);
  if (report.pairs.length === 0) {
    return card("Most similar pairs", h("p", { class: "empty" }, "There is no pair to show."), search);
  }
  const path = `/v1/probes/${encodeURIComponent(jobId)}/pairs`;
  const items = h("ol", { class: "pairs" }, ...report.pairs.slice(0, PAIRS_FIRST).map(pairItem));
  const note = h("p", { class: "hint", role: "status" });
  let offset = Math.min(PAIRS_FIRST, report.pairs.length);
  const more = h("button", { type: "button" }, "Show more");
  more.addEventListener("click", async () => {
    more.disabled = true;
    try {
      const page = await getJson(`${path}?offset=${offset}&limit=${PAIRS_PAGE}`);
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
    search,
    items,
    h(
      "div",
      { class: "actions" },
      more,
      resultLink("All as CSV", `${path}?format=csv`, "pairs.csv"),
      resultLink("All as JSON lines", `${path}?format=jsonl`, "pairs.jsonl"),
      note,
    ),
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
