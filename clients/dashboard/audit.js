// The audit of one probe: choose how much to ask, wait for the pairs, label them, read what the labels say.

import { byId, count, estimate, fill, h, plural, say, sentence, share } from "./dom.js";
import { Problem, Unreachable, getJson, isAway, post, remove } from "./api.js";
import { Chart } from "./charts.js";
import { Labelling } from "./labelling.js";
import { card, facts, figuresTable, limitInFigures, problemBox, resultLink, verdictChip, verdictList, warningsSection } from "./report.js";

const POLL_MS = 700;
const LABELS = [100, 200, 500];
const USUAL_LABELS = 200;
const CHECKS = 20;
const REPEATED_SHARE = 0.2;
const SECONDS_A_QUESTION = 5;

const PHASES = {
  reading: "Reading the corpus",
  loading: "Loading the encoder",
  encoding: "Fetching the vectors",
  drawing: "Drawing pairs",
};

export class AuditView {
  constructor(id, leave) {
    this.path = `/v1/probes/${encodeURIComponent(id)}/audit`;
    this.probePath = `/v1/probes/${encodeURIComponent(id)}`;
    this.leave = leave;
    this.stop = new AbortController();
    this.chart = null;
    this.labelling = null;
    this.sizes = []; // of the probe
    this.isRandom = true;
    this.body = byId("audit-body");
    byId("audit-back").href = `#/probes/${encodeURIComponent(id)}`;
  }

  async show() {
    const { signal } = this.stop;
    document.addEventListener("keydown", (event) => this.labelling?.key(event), { signal });
    window.addEventListener("beforeunload", (event) => this.labelling?.hasUnsent && event.preventDefault(), { signal });
    fill(this.body);
    say(byId("audit-title"), "Audit");
    byId("audit-title").focus({ preventScroll: true });
    scrollTo(0, 0);
    await this.guarded(async () => {
      const job = await getJson(this.probePath, signal);
      this.sizes = (job.progress?.curve ?? []).map((point) => point.batch_size);
      this.isRandom = job.request.sampler.kind === "random";
      say(byId("audit-title"), `Audit of ${job.corpus_name}`);
      document.title = `Audit of ${job.corpus_name} · probe-service`;
      await this.look();
    });
  }

  close() {
    this.stop.abort();
    this.chart?.close();
    byId("link-notice").hidden = true;
  }

  /** Show what the audit's state asks for. */
  async look() {
    let audit;
    try {
      audit = await getJson(this.path, this.stop.signal);
    } catch (error) {
      if (error.code !== "audit_not_found") throw error;
      this.choose();
      return;
    }
    if (audit.state === "failed") this.choose(new Problem(audit.error));
    else if (audit.state === "cancelled") this.choose();
    else if (audit.state !== "succeeded") await this.drawing(audit);
    else if (audit.counts.open > 0) this.label();
    else await this.result();
  }

  say(text) {
    say(byId("audit-live"), text);
  }

  // ------------------------------------------------------------------------------------------------ how much

  choose(problem = null) {
    const choice = (labels) => {
      const questions = Math.round(labels * (1 + REPEATED_SHARE)) + 2 * CHECKS;
      const minutes = Math.round((questions * SECONDS_A_QUESTION) / 60);
      return h(
        "label",
        { class: "choice" },
        h("input", { type: "radio", name: "labels", value: labels, checked: labels === USUAL_LABELS }),
        h("span", {}, h("strong", {}, `${labels} labels`), h("span", { class: "hint" }, `about ${questions} questions, ${minutes} minutes`)),
      );
    };
    const form = h(
      "form",
      { class: "card" },
      h("h2", {}, "Have a few pairs judged"),
      h(
        "p",
        {},
        "Pairs are drawn in proportion to the push that they receive in training. For each you say whether the one text ",
        "would do as a positive for the other; the share of yes is S, at every batch size at once, with an interval.",
      ),
      h(
        "p",
        { class: "hint" },
        "A fifth of the pairs comes twice, and some have a certain answer: they tell how sure the answers are. You may stop ",
        "at any time and go on later; there is a result once every question has an answer, and unsure is one.",
      ),
      h("fieldset", { class: "plain choices" }, h("legend", { class: "hidden" }, "Number of labels"), ...LABELS.map(choice)),
      h(
        "div",
        { class: "field" },
        h("label", { for: "audit-size" }, "Batch size"),
        h(
          "select",
          { id: "audit-size", name: "batch_size", "aria-describedby": "audit-size-hint" },
          h("option", { value: "" }, "All sizes of the report at once"),
          ...this.sizes.map((each) => h("option", { value: each, selected: !this.isRandom && each === this.sizes.at(-1) }, count(each))),
        ),
        h("p", { id: "audit-size-hint", class: "hint" }, "One size where batches are not random, or where rows bring hard negatives."),
      ),
      problem && problemBox(problem),
      h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Draw pairs")),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const chosen = new FormData(form);
      const wanted = {
        labels: Number(chosen.get("labels")),
        batch_size: Number(chosen.get("batch_size")) || null,
        checks: CHECKS,
      };
      form.querySelector("button").disabled = true;
      this.guarded(async () => this.drawing(await post(this.path, wanted)));
    });
    fill(this.body, form);
  }

  // ------------------------------------------------------------------------------------------------ drawing

  async drawing(audit) {
    const phase = h("strong", { id: "audit-phase" });
    const bar = h("progress", { max: 1, "aria-labelledby": "audit-phase" });
    const cancel = h("button", { type: "button" }, "Cancel");
    cancel.addEventListener("click", () => {
      cancel.disabled = true;
      this.guarded(() => post(`${this.path}/cancel`));
    });
    fill(
      this.body,
      h(
        "div",
        { class: "card" },
        phase,
        bar,
        h("div", { class: "progress-line" }, h("span", { class: "hint" }, "This page may be closed; the drawing goes on."), cancel),
      ),
    );
    let present = audit;
    while (["queued", "running", "cancelling"].includes(present.state)) {
      const { progress, state } = present;
      let words = progress ? PHASES[progress.phase] : "Waiting for a free worker";
      if (state === "cancelling") words = "Stopping; the step that runs now ends first";
      say(phase, words);
      this.say(words);
      if (progress && progress.phase !== "drawing") bar.value = progress.fraction;
      else bar.removeAttribute("value"); // one long step: it moves, but nobody knows how far
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      present = await this.patiently(() => getJson(this.path, this.stop.signal));
    }
    await this.look();
  }

  /** Ask again while the service is away. */
  async patiently(ask) {
    const notice = byId("link-notice");
    for (;;) {
      try {
        const answer = await ask();
        notice.hidden = true;
        return answer;
      } catch (error) {
        if (!(error instanceof Unreachable) && !isAway(error)) throw error;
        notice.hidden = false;
        say(notice, "The service does not answer. The drawing goes on when it is back; this page asks again by itself.");
        await new Promise((resolve) => setTimeout(resolve, POLL_MS));
      }
    }
  }

  // ------------------------------------------------------------------------------------------------ labels and result

  label({ atEnd = false } = {}) {
    this.chart?.close();
    this.labelling = new Labelling(this.path, {
      onDone: () => this.guarded(() => this.result()),
      onError: (error) => this.fail(error),
      signal: this.stop.signal,
    });
    fill(this.body, this.labelling.element);
    this.labelling.start({ atEnd });
  }

  async result() {
    this.labelling = null;
    fill(
      this.body,
      h(
        "div",
        { class: "card" },
        h("strong", { id: "audit-phase" }, "Working out what the labels say"),
        h("progress", { "aria-labelledby": "audit-phase" }),
      ),
    );
    const report = await getJson(`${this.path}/report`, this.stop.signal);
    this.chart = new Chart(
      `${this.path}/chart.json`,
      "audit",
      "How much of the push is wrong",
      "The share of an anchor's push on its negatives that lands on rows that mean the same, as the labels have it, with its interval.",
    );
    fill(
      this.body,
      answerSection(report),
      warningsSection(report),
      this.chart.figure,
      sharesSection(report),
      labelsSection(report),
      this.actions(),
    );
    this.chart.draw();
    this.say("The labels are worked out.");
  }

  actions() {
    return h(
      "div",
      { class: "actions" },
      h("button", { type: "button", click: () => this.label({ atEnd: true }) }, "Change answers"),
      resultLink("JSON", `${this.path}/report`, "audit.json"),
      h("button", { type: "button", class: "quiet danger", click: () => this.delete() }, "Delete this audit"),
    );
  }

  async delete() {
    if (!window.confirm("Delete this audit? The labels stay known and are used again when the same pairs are drawn.")) return;
    await this.guarded(async () => {
      await remove(this.path);
      await this.look();
    });
  }

  async guarded(work) {
    try {
      await work();
    } catch (error) {
      this.fail(error);
    }
  }

  fail(error) {
    if (this.stop.signal.aborted || error.name === "AbortError") return;
    this.labelling = null;
    if (error.status === 401) {
      this.leave(error);
      return;
    }
    const again = h("button", { type: "button", click: () => this.guarded(() => this.look()) }, "Try again");
    fill(this.body, problemBox(error, again));
  }
}

// ------------------------------------------------------------------------------------------------ the result

function answerSection(report) {
  const limit = report.n_max;
  return h(
    "section",
    { class: "card hero", "aria-labelledby": "audit-answer" },
    h(
      "div",
      { class: "answer" },
      h("p", { class: "answer-figure", "data-n-max": limit?.value ?? "none" }, limit ? limitInFigures(limit) : "–"),
      h("p", { class: "hint" }, "largest batch size shown to be safe"),
    ),
    h(
      "div",
      { class: "reasons" },
      h("h2", { id: "audit-answer" }, headline(limit)),
      limit && h("p", {}, sentence(limit.reason)),
      h("p", { class: "hint" }, `Intervals are at ${report.confidence_level}. Judged by ${report.judges.join(", ")}. Encoder ${report.encoder}.`),
    ),
    verdictList(report.verdicts),
  );
}

function headline(limit) {
  if (limit === null) return "The labels speak of this batch size alone.";
  if (limit.value === null) return "By the labels no batch size is shown to be safe.";
  return `By the labels, batches of up to ${count(limit.value)} rows keep within the budget.`;
}

function sharesSection(report) {
  const verdicts = new Map(report.verdicts.map((verdict) => [verdict.batch_size, verdict.verdict]));
  const columns = [
    ["Batch size", (row) => count(row.batch_size)],
    ["Verdict", (row) => verdictChip(verdicts.get(row.batch_size))],
    ["Push on same-meaning rows, S", (row) => estimate(row.estimate)],
    ["Worth as many labels", (row) => count(Math.round(row.effective_labels))],
    ["Known without labels", (row) => share(row.known_share)],
  ];
  return card("In figures", figuresTable("Table of the audit", columns, report.shares));
}

function labelsSection(report) {
  const { labels } = report;
  const of = (part, all) => (all === 0 ? null : `${count(part)} of ${count(all)}`);
  return card(
    "The labels",
    facts([
      ["Pairs drawn", `${count(labels.pairs_drawn)}, ${plural(labels.questions, "different one", "different ones")}`],
      ["Answers", `${count(labels.yes)} yes, ${count(labels.no)} no, ${count(labels.unsure)} unsure`],
      ["Asked twice, answered differently", of(labels.repeats_answered_differently, labels.repeats)],
      ["Certain duplicates accepted", of(labels.duplicates_accepted, labels.duplicates)],
      ["Certain others accepted", of(labels.others_accepted, labels.others)],
    ]),
  );
}
