// One job from queue to report.

import { byId, count, duration, fill, h, say, when } from "./dom.js";
import { Problem, follow, getJson, post, remove } from "./api.js";
import { Chart } from "./charts.js";
import { duplicatesSection, hardNegativesSection, harmSection, remediesSection, tradeOffSection } from "./changes.js";
import { factsSection } from "./method.js";
import {
  auditSection,
  curveSection,
  curveTable,
  linksSection,
  pairsSection,
  problemBox,
  verdictSection,
  warningsSection,
} from "./report.js";

const QUIET_SECONDS = 12;
const WORKERS_EVERY_SECONDS = 5;

export const STATES = {
  queued: "waiting",
  running: "running",
  cancelling: "stopping",
  cancelled: "cancelled",
  succeeded: "done",
  failed: "failed",
};

const PHASES = {
  reading: "Reading the corpus",
  loading: "Loading the encoder",
  encoding: "Encoding the rows",
  measuring: "Measuring batch by batch",
  advising: "Working out the advice",
};

const CHARTS = {
  share: ["How much of the push is wrong", "The share of an anchor's push on its negatives that lands on rows that mean the same."],
  similarity: ["How similar the hardest negatives are", "The largest similarities of a batch, beside what chance alone would give."],
  histogram: ["All similarities", "How similar two rows of this corpus are, drawn at random."],
  sources: [
    "Which sources harm each other",
    "Push on same-meaning rows by the source of the anchor (down) and of the candidate (across). The figure in a cell is the share of its own push that is false.",
  ],
  temperature: ["At another temperature", "S at other temperatures, one line for each batch size; the upright line is this report's own."],
};

/** The charts that a report has something for. */
function chartsOf(report) {
  const lacking = new Set();
  if (report.harm === null || report.harm.sources.length < 2) lacking.add("sources");
  if (report.shares_by_temperature === null) lacking.add("temperature");
  return Object.keys(CHARTS).filter((name) => !lacking.has(name));
}

const ended = (job) => ["succeeded", "failed", "cancelled"].includes(job.state);

export class JobView {
  constructor(id, leave) {
    this.id = id;
    this.path = `/v1/probes/${encodeURIComponent(id)}`;
    this.leave = leave;
    this.stop = new AbortController();
    this.charts = new Map();
    this.job = null;
    this.drawn = "";
    this.heardAt = Date.now();
    this.workers = null;
    this.workersAskedAt = 0;
  }

  async show() {
    this.clear();
    const { signal } = this.stop;
    byId("cancel").addEventListener("click", () => this.cancel(), { signal });
    byId("delete").addEventListener("click", () => this.delete(), { signal });
    const clock = setInterval(() => this.tick(), 1000);
    signal.addEventListener("abort", () => clearInterval(clock));
    try {
      await follow(this.id, { onJob: (job) => this.update(job), onLink: (connected) => this.link(connected), signal });
    } catch (error) {
      this.fail(error);
    } finally {
      clearInterval(clock);
    }
  }

  close() {
    this.stop.abort();
    this.charts.forEach((chart) => chart.close());
    this.link(true);
  }

  clear() {
    for (const id of ["verdict", "charts", "details", "job-error"]) fill(byId(id));
    for (const id of ["progress-card", "job-error", "job-foot"]) byId(id).hidden = true;
    byId("job-title").textContent = "Probe";
    byId("job-meta").textContent = "";
    byId("job-state").hidden = true;
    byId("worker-notice").textContent = "";
    byId("cancel").disabled = false;
    byId("live").textContent = "";
  }

  /** Tell whether the service answers; the job itself goes on without this page. */
  link(connected) {
    const notice = byId("link-notice");
    notice.hidden = connected;
    say(notice, connected ? "" : "The service does not answer. The job is kept there and goes on when it is back; this page reconnects by itself.");
    this.connected = connected;
  }

  update(job) {
    this.job = job;
    this.heardAt = Date.now();
    say(byId("job-title"), job.corpus_name);
    document.title = `${job.corpus_name} · probe-service`;
    byId("job-meta").textContent = [
      job.request.encoder ? `encoder ${job.request.encoder}` : "default encoder",
      `temperature ${job.request.temperature}`,
      `budget ${job.request.budget}`,
      `sent ${when(job.created_at)}`,
    ].join(" · ");
    const state = byId("job-state");
    state.hidden = false;
    state.className = `chip state-${job.state}`;
    say(state, STATES[job.state]);
    this.progress(job);
    if (ended(job)) this.end(job);
    else this.growing(job);
  }

  progress(job) {
    byId("progress-card").hidden = ended(job);
    if (ended(job)) return;
    const bar = byId("job-bar");
    const { progress } = job;
    let phase = "Waiting for its turn";
    if (job.state === "cancelling") phase = "Stopping; the step that runs now ends first";
    else if (progress) phase = PHASES[progress.phase];
    else if (job.state === "running") phase = "Starting";
    if (progress) bar.value = progress.fraction;
    else bar.removeAttribute("value");
    say(byId("phase"), phase);
    say(byId("live"), phase);
    byId("done").textContent = progress && progress.total > 1 ? `${count(progress.done)} of ${count(progress.total)} ${progress.unit}` : "";
    const left = progress?.eta_seconds;
    byId("eta").textContent = [
      progress ? `${Math.round(progress.fraction * 100)} %` : "",
      left === null || left === undefined ? "" : `about ${duration(left)} left`,
    ]
      .filter(Boolean)
      .join(" · ");
    byId("cancel").disabled = job.state === "cancelling";
    this.tick();
  }

  /** Say it when nothing happens, and when a worker has taken the job up again. */
  tick() {
    const { job } = this;
    if (!job || ended(job)) return;
    const quietSeconds = (Date.now() - this.heardAt) / 1000;
    const stalled = job.state === "queued" || quietSeconds > QUIET_SECONDS;
    if (stalled && this.connected) this.countWorkers();
    let notice = "";
    if (stalled && this.workers === 0) {
      notice = "No worker is alive at the moment. The job is kept, and goes on from its last step as soon as there is one.";
    } else if (job.state === "queued") {
      notice = "It begins when a worker is free. This page may be closed; the job is kept.";
    } else if (stalled && this.connected) {
      notice = `No news for ${duration(quietSeconds)}; the worker is alive and busy with one long step.`;
    } else if (job.attempts > 1) {
      notice = `The worker was restarted; the job goes on where it had stopped (start ${job.attempts}).`;
    }
    say(byId("worker-notice"), notice);
  }

  /** Ask, now and then, whether there is a worker at all. */
  async countWorkers() {
    if (Date.now() - this.workersAskedAt < WORKERS_EVERY_SECONDS * 1000) return;
    this.workersAskedAt = Date.now();
    try {
      const { workers } = await getJson("/info", this.stop.signal);
      this.workers = workers.length;
    } catch {
      this.workers = null; // the lost connection is told elsewhere
    }
  }

  /** Draw the sizes measured so far, or what the rows encoded so far say of them. */
  growing(job) {
    const curve = job.progress?.curve ?? [];
    const rows = job.progress?.curve_rows ?? null;
    const shown = `${rows} ${curve.length}`;
    if (shown === this.drawn || curve.length === 0) return;
    this.drawn = shown;
    const hint =
      rows === null
        ? "These figures stand; larger sizes follow."
        : `From the first ${count(rows)} rows, drawn at random, while the others are being encoded: intervals narrow, and larger sizes follow.`;
    this.chart("share");
    this.chart("similarity");
    fill(
      byId("details"),
      h("section", { class: "card" }, h("h2", {}, "So far"), h("p", { class: "hint" }, hint), curveTable(curve)),
    );
  }

  chart(name) {
    if (!this.charts.has(name)) {
      const chart = new Chart(`${this.path}/charts/${name}.json`, name, ...CHARTS[name]);
      this.charts.set(name, chart);
      byId("charts").append(chart.figure);
    }
    this.charts.get(name).draw();
  }

  async end(job) {
    byId("job-foot").hidden = false;
    byId("another").hidden = job.state === "failed"; // the problem has a link of its own
    say(byId("live"), `This probe is ${STATES[job.state]}.`);
    if (job.state === "succeeded") {
      try {
        this.report(await getJson(`${this.path}/report`, this.stop.signal));
      } catch (error) {
        this.fail(error);
      }
    } else if (job.state === "failed") {
      this.fail(new Problem(job.error));
    } else {
      byId("job-error").hidden = false;
      fill(byId("job-error"), h("p", { class: "card empty" }, "It was cancelled before it had a report."));
    }
  }

  report(report) {
    fill(byId("verdict"), verdictSection(report), auditSection(report, this.id), linksSection(this.id));
    fill(
      byId("details"),
      warningsSection(report),
      remediesSection(report),
      duplicatesSection(report),
      harmSection(report),
      tradeOffSection(report),
      curveSection(report),
      hardNegativesSection(report),
      pairsSection(report, this.id),
      factsSection(report),
    );
    for (const name of chartsOf(report)) this.chart(name);
    byId("job-meta").textContent = [
      `${count(report.corpus.rows_encoded)} of ${count(report.corpus.rows_usable)} rows`,
      `encoder ${report.encoder.name}`,
      `temperature ${report.sampling.temperature}`,
      when(report.run.finished_at),
    ].join(" · ");
    say(byId("live"), report.advice.headline);
  }

  fail(error) {
    if (this.stop.signal.aborted || error.name === "AbortError") return;
    byId("progress-card").hidden = true;
    byId("job-error").hidden = false;
    const again = h("a", { class: "button", href: "#/" }, error.code === "job_not_found" ? "New probe" : "Change it and try again");
    fill(byId("job-error"), problemBox(error, again));
    if (error.status === 401) this.leave(error);
  }

  async cancel() {
    byId("cancel").disabled = true;
    say(byId("phase"), "Asking it to stop");
    try {
      this.update(await post(`${this.path}/cancel`));
    } catch (error) {
      byId("cancel").disabled = false;
      say(byId("worker-notice"), `It could not be cancelled: ${error.message}`);
    }
  }

  async delete() {
    if (!window.confirm("Delete this probe and what it stored? This cannot be undone.")) return;
    try {
      await remove(this.path);
      this.leave();
    } catch (error) {
      byId("job-error").hidden = false;
      fill(byId("job-error"), problemBox(error));
    }
  }
}
