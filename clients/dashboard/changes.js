// What to change, who brings the harm, and what a larger batch costs and brings.

import { count, estimate, h, plural, share, visible } from "./dom.js";
import { card, facts, figuresTable, limitInFigures, save } from "./report.js";

const ROWS_SHOWN = 60;

/** Code that opens, as text with its lines, and a button that copies it. */
function codeBlock(title, text) {
  const code = h("pre", { tabindex: "0" });
  code.textContent = text.split("\n").map(visible).join("\n");
  const button = h("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code); // no clipboard here: the keyboard's copy takes it
      button.textContent = "Selected";
    }
  });
  return h("details", { class: "code" }, h("summary", {}, title), code, button);
}

/** The remedies, each with what it does to S, and code to paste. */
export function remediesSection(report) {
  const { remedies, snippet } = report.advice;
  if (remedies.length === 0 && snippet === null) return null;
  const incomplete = report.curve.some((point) => point.worst_case !== null);
  const columns = [
    [
      "Change",
      (remedy) => [
        h("strong", {}, remedy.title),
        h("p", { class: "hint" }, remedy.effect),
        remedy.rows.length === 0
          ? null
          : h("details", {}, h("summary", {}, plural(remedy.rows.length, "row to drop", "rows to drop")), h("p", { class: "hint" }, remedy.rows.join(", "))),
        remedy.snippet && codeBlock("Code to paste", remedy.snippet),
      ],
    ],
    ["Batch size", (remedy) => count(remedy.batch_size)],
    ["S before", (remedy) => estimate(remedy.share_before)],
    ["S after", (remedy) => (remedy.share_after ? estimate(remedy.share_after) : "not measured, or as it is")],
    ["Largest safe size after", (remedy) => (remedy.n_max_after ? limitInFigures(remedy.n_max_after) : "not measured")],
    ["True push lost", (remedy) => (remedy.true_push_lost === null ? "none" : share(remedy.true_push_lost))],
  ];
  return card(
    "What to change",
    snippet && codeBlock("Train within the limit: arguments and loss to paste", snippet),
    ...(remedies.length === 0
      ? []
      : [
          h(
            "p",
            { class: "hint" },
            "What each change does to S at the size at which it was tried. True push lost: of the push on pairs not known to be false, the share that goes with it.",
            incomplete ? " Where pairs are unjudged, S is the lower bound and its range reaches up to the worst case." : "",
          ),
          figuresTable("Remedies", columns, remedies, "stacked"),
        ]),
  );
}

/** The rows that repeat an earlier one, and what dropping them does. */
export function duplicatesSection(report) {
  const drop = report.advice.drop_duplicates;
  const found = report.corpus.duplicates;
  if (!drop || drop.rows_to_drop.length === 0) {
    const repeats = plural(found.normalized, "row repeats", "rows repeat");
    const said =
      found.normalized > 0
        ? `${repeats} an earlier row, but what dropping them does was not measured.`
        : "No text comes twice; there is nothing to drop.";
    return card("Rows to drop", h("p", { class: "empty" }, said));
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
    codeBlock("Code to paste", drop.snippet),
  );
}

function limitInWords(limit) {
  if (limit.value === null) return "none";
  return limit.exceeded ? count(limit.value) : `at least ${count(limit.value)}`;
}

/** The rows that bring the harm; the sources have a chart. */
export function harmSection(report) {
  const { harm } = report;
  if (harm === null || harm.rows.length === 0) return null;
  const columns = [
    [
      "Row",
      (row) => [
        // A corpus may hold anything: shown as text only, in its own direction.
        h("p", { dir: "auto" }, row.text ?? "(no text)"),
        h("span", { class: "hint" }, `row ${count(row.row)}${row.source ? ` · ${row.source}` : ""}`),
      ],
    ],
    ["Receives, of all push", (row) => row.as_candidate.toFixed(5)],
    ["Brings as anchor", (row) => row.as_anchor.toFixed(5)],
  ];
  return card(
    "Who brings the harm",
    h(
      "p",
      {},
      `At ${count(harm.batch_size)} rows S is ${share(harm.share)}. `,
      harm.rows_with_half ? `Half of the push on same-meaning rows goes to ${count(harm.rows_with_half)} of ${count(report.corpus.rows_encoded)} rows.` : "",
    ),
    h("details", {}, h("summary", {}, "The rows that most of it goes to or comes from"), figuresTable("Rows that bring the harm", columns, harm.rows, "stacked")),
  );
}

/** Both sides of a larger batch, and the lower end of the window. */
export function tradeOffSection(report) {
  const { trade_off: sentences, starvation_floor: floor } = report.advice;
  if (sentences.length === 0 && floor === null) return null;
  return card(
    "What a larger batch costs and brings",
    ...sentences.map((each) => h("p", {}, each)),
    floor && h("h3", {}, "The lower end: where gradients starve"),
    floor &&
      facts([
        ["Smallest batch", smallestBatch(floor)],
        ["Loss", `in ${floor.dtype} at T = ${floor.temperature}`],
        ["Mean similarity of positives", `${share(floor.positive_similarity)}${floor.positives === "dropout" ? ", of two passes with dropout" : ""}`],
        ["Error of the gradient, at most", share(floor.largest_error)],
        ["What helps", floor.remedies.join(" ")],
      ]),
  );
}

function smallestBatch(floor) {
  if (floor.batch_size === null) return `none: even ${count(floor.tested_up_to)} rows starve`;
  if (floor.batch_size === floor.tested_from) return `no measured size starves, from ${count(floor.tested_from)} to ${count(floor.tested_up_to)} rows`;
  return `${plural(floor.batch_size, "row", "rows")}; smaller batches starve`;
}

/** What falls to the rows' own and to other rows' hard negatives. */
export function hardNegativesSection(report) {
  const points = report.curve.filter((point) => point.hard_negatives !== null);
  if (points.length === 0) return null;
  const columns = [
    ["Batch size", (point) => count(point.batch_size)],
    ["Push on the row's own", (point) => estimate(point.hard_negatives.own_push)],
    ["On known false ones among them", (point) => estimate(point.hard_negatives.own_false)],
    ["Push on those of other rows", (point) => estimate(point.hard_negatives.other_push)],
    ["On known false ones among those", (point) => estimate(point.hard_negatives.other_false)],
  ];
  return card(
    "Hard negatives",
    h("p", { class: "hint" }, "Shares of an anchor's push. Hard negatives are often mined from what is most similar: audit them apart."),
    figuresTable("Table of hard negatives", columns, points),
  );
}
