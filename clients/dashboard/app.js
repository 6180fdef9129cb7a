// The page: what is shown at which address, the form, and the list of jobs.

import { byId, bytes, fill, h, plural, when } from "./dom.js";
import { Problem, freshKey, getJson, rememberKey, submit } from "./api.js";
import { AuditView } from "./audit.js";
import { JobView, STATES } from "./job.js";
import { problemLines } from "./report.js";

const RECENT_JOBS = 12;
const PEEK_BYTES = 65536;
const ADDRESS = /^#\/probes\/([^/]+)(\/audit)?$/;
const VIEWS = ["key-view", "home-view", "job-view", "audit-view"];

let view = null; // of a job or of its audit
let chosen = null; // the file to send, if one was dropped or picked
let attempt = null; // {fingerprint, key}: the same submission again, after a lost connection, has the same key
let uploading = null;

// ------------------------------------------------------------------------------------------------ addresses

function reveal(id) {
  for (const each of VIEWS) byId(each).hidden = each !== id;
}

function route() {
  view?.close();
  view = null;
  const match = ADDRESS.exec(location.hash);
  if (match === null) {
    reveal("home-view");
    document.title = "probe-service";
    showRecent();
    return;
  }
  const [, id, audit] = match;
  reveal(audit ? "audit-view" : "job-view");
  view = new (audit ? AuditView : JobView)(decodeURIComponent(id), (error) => (error ? askForKey() : (location.hash = "#/")));
  view.show();
}

function moveTo(hash, heading) {
  location.hash = hash;
  byId(heading).focus({ preventScroll: true });
  scrollTo(0, 0);
}

function askForKey() {
  reveal("key-view");
  byId("api-key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  rememberKey(byId("api-key").value.trim());
  begin();
});

// ------------------------------------------------------------------------------------------------ the list of jobs

async function showRecent() {
  const empty = byId("recent-empty");
  try {
    const { jobs } = await getJson(`/v1/probes?limit=${RECENT_JOBS}`);
    fill(
      byId("recent-jobs"),
      ...jobs.map((job) =>
        h(
          "li",
          {},
          h(
            "a",
            { href: `#/probes/${encodeURIComponent(job.id)}` },
            h("span", { class: "job-name" }, job.corpus_name),
            h("span", { class: "hint" }, when(job.created_at)),
            h("span", { class: `chip state-${job.state}` }, STATES[job.state]),
          ),
        ),
      ),
    );
    empty.hidden = jobs.length > 0;
  } catch (error) {
    if (error.status === 401) {
      askForKey();
      return;
    }
    empty.hidden = false;
    empty.textContent = `The list could not be fetched: ${error.message}`;
  }
}

// ------------------------------------------------------------------------------------------------ the corpus

function choose(files) {
  showError(null);
  if (files.length > 1) {
    showError(new Error(`One corpus at a time, please: ${files.length} files were dropped.`));
    return;
  }
  [chosen = null] = files;
  byId("chosen-file").hidden = chosen === null;
  byId("drop-zone").classList.toggle("filled", chosen !== null);
  byId("pasted-lines").disabled = chosen !== null;
  fill(byId("columns"));
  if (chosen === null) {
    byId("corpus-file").value = "";
    return;
  }
  byId("chosen-name").textContent = chosen.name;
  byId("chosen-size").textContent = bytes(chosen.size);
  suggestColumns(chosen);
}

/** Offer the names of the columns that the first line shows; a guess, so nothing rests on it. */
async function suggestColumns(file) {
  const [first] = (await file.slice(0, PEEK_BYTES).text()).split("\n", 1);
  let names = [];
  if (/\.(jsonl|ndjson)$/i.test(file.name)) {
    try {
      names = Object.keys(JSON.parse(first));
    } catch {
      return; // the service says what is wrong with it
    }
  } else if (/\.[ct]sv$/i.test(file.name)) {
    names = first.trim().split(/\.tsv$/i.test(file.name) ? "\t" : ",").map((name) => name.replace(/^"|"$/g, ""));
  }
  if (file === chosen) fill(byId("columns"), ...names.slice(0, 50).map((name) => h("option", { value: name })));
}

const dropZone = byId("drop-zone");

for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    dropZone.classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => {
  if (event.relatedTarget === null) dropZone.classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault(); // a file dropped beside the zone must not replace the page
  dropZone.classList.remove("over");
  if (byId("home-view").hidden || uploading) return;
  const items = [...event.dataTransfer.items];
  if (items.some((item) => item.webkitGetAsEntry?.()?.isDirectory)) {
    showError(new Error("That is a folder; drop one file."));
    return;
  }
  if (event.dataTransfer.files.length > 0) choose(event.dataTransfer.files);
});
byId("corpus-file").addEventListener("change", (event) => choose(event.target.files));
byId("forget-file").addEventListener("click", () => {
  choose([]);
  byId("corpus-file").focus();
});
byId("pasted-lines").addEventListener("input", (event) => {
  const lines = event.target.value.split("\n").filter((line) => line.trim() !== "").length;
  byId("line-count").textContent = lines ? plural(lines, "text", "texts") : "";
});

/** The file to send and its name: the chosen one, or the pasted lines as a text file. */
function corpusToSend() {
  if (chosen !== null) return { file: chosen, name: chosen.name, format: null };
  const lines = byId("pasted-lines").value;
  if (lines.trim() === "") throw new Error("Drop a file or paste some lines first.");
  return { file: new Blob([lines], { type: "text/plain" }), name: "pasted lines.txt", format: "txt" };
}

// ------------------------------------------------------------------------------------------------ the request

/** A field that holds something it cannot mean. */
class FieldError extends Error {
  constructor(id, message) {
    super(message);
    this.id = id;
  }
}

function textOf(id) {
  return byId(id).value.trim() || null;
}

function numberOf(id, what, accepts) {
  const text = textOf(id);
  if (text === null) return null;
  const number = Number(text.replaceAll(" ", ""));
  if (Number.isNaN(number) || !accepts(number)) throw new FieldError(id, `${text} will not do: ${what}.`);
  return number;
}

function batchSizes() {
  const text = textOf("batch-sizes");
  if (text === null) return null;
  return text.split(/[\s,;]+/).filter(Boolean).map((part) => {
    const size = Number(part);
    if (!Number.isInteger(size) || size < 2) {
      throw new FieldError("batch-sizes", `${part} will not do: a batch size is a whole number of at least 2.`);
    }
    return size;
  });
}

/** The request as the form has it; what is left empty is left to the service. */
function requestFromForm(format) {
  const whole = (low) => (number) => Number.isInteger(number) && number >= low;
  const textColumn = textOf("text-column");
  const positive = textOf("positive-column");
  const columns = {
    [positive === null ? "text" : "anchor"]: textColumn,
    positive,
    group: textOf("group-column"),
    source: textOf("source-column"),
  };
  const request = {
    encoder: textOf("encoder"),
    batch_sizes: batchSizes(),
    temperature: numberOf("temperature", "the temperature is above 0", (number) => number > 0),
    budget: numberOf("budget", "the budget is a share from 0 to 1", (number) => number >= 0 && number <= 1),
    num_repeats: numberOf("num-repeats", "give a whole number of at least 2", whole(2)),
    seed: numberOf("seed", "the seed is a whole number, 0 or more", whole(0)),
    pairs_above: numberOf("pairs-above", "a similarity is a number from −1 to 1", (number) => number >= -1 && number <= 1),
    sampler: given({
      kind: textOf("sampler"),
      world_size: numberOf("world-size", "devices are a whole number of at least 1", whole(1)),
      gather: byId("gather").checked || null,
    }),
    corpus: given({
      format,
      columns: given(columns),
      max_rows: numberOf("max-rows", "give a whole number of at least 2", whole(2)),
      case_fold: byId("case-fold").checked || null,
    }),
  };
  return given(request);
}

const given = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null));

// ------------------------------------------------------------------------------------------------ sending

function showError(error) {
  const box = byId("form-error");
  document.querySelectorAll("[aria-invalid]").forEach((field) => {
    field.removeAttribute("aria-invalid");
  });
  box.hidden = error === null;
  fill(box, error === null ? null : problemLines(error));
  if (error instanceof FieldError) {
    byId(error.id).closest("details").open = true;
    byId(error.id).setAttribute("aria-invalid", "true");
    byId(error.id).focus();
  }
}

function showUpload(sent) {
  byId("upload").hidden = sent === null;
  byId("measure").disabled = sent !== null;
  if (sent === null) return;
  byId("upload-bar").value = sent;
  byId("upload-text").textContent = sent < 1 ? `Sending, ${Math.floor(sent * 100)} %` : "Sent; being checked";
}

byId("probe-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  showError(null);
  uploading = new AbortController();
  try {
    const { file, name, format } = corpusToSend();
    const request = requestFromForm(format);
    const fingerprint = JSON.stringify([name, file.size, file.lastModified, chosen === null ? byId("pasted-lines").value : "", request]);
    if (attempt?.fingerprint !== fingerprint) attempt = { fingerprint, key: freshKey() };
    showUpload(0);
    const job = await submit(file, name, request, attempt.key, { onSent: showUpload, signal: uploading.signal });
    attempt = null;
    moveTo(`#/probes/${encodeURIComponent(job.id)}`, "job-title");
  } catch (error) {
    if (error instanceof Problem) attempt = null;
    if (error.status === 401) askForKey();
    else if (error.name !== "AbortError") showError(error);
  } finally {
    uploading = null;
    showUpload(null);
  }
});
byId("upload-stop").addEventListener("click", () => uploading?.abort());
window.addEventListener("beforeunload", (event) => {
  if (uploading) event.preventDefault();
});

// ------------------------------------------------------------------------------------------------ beginning

async function showEncoders() {
  const { encoders } = await getJson("/v1/encoders");
  byId("encoder").append(...encoders.map((encoder) => h("option", { value: encoder.name }, encoder.name)));
}

async function showInfo() {
  const info = await getJson("/info");
  byId("service-info").textContent = `probe-service ${info.version}`;
}

function begin() {
  route();
  // Both are extras: the form works without them, and the list of jobs says it when the service is away.
  showEncoders().catch(() => {});
  showInfo().catch(() => {});
}

window.addEventListener("hashchange", route);
begin();
