// The service as the page sees it: requests, uploads with progress, and the events of a job.

const KEY_NAME = "probe-api-key";
const FIRST_PAUSE_MS = 400;
const LONGEST_PAUSE_MS = 5000;
const SILENCE_MS = 60000; // not even a keep-alive for this long: the connection is dead
const AWAY_STATUSES = new Set([502, 503, 504]);

/** The service answered with a problem document. */
export class Problem extends Error {
  constructor(fields) {
    super(fields.detail);
    Object.assign(this, { row: null, column: null, count: null }, fields);
  }
}

/** No answer came. */
export class Unreachable extends Error {}

export function rememberKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

export const hasKey = () => sessionStorage.getItem(KEY_NAME) !== null;

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function problemOf(status, statusText, text) {
  try {
    const fields = JSON.parse(text);
    if (fields.code && fields.detail) return new Problem(fields);
  } catch {
    // not JSON: a proxy's page, say
  }
  const detail = `The service answered ${status} ${statusText}.`;
  return new Problem({ title: statusText || "Error", detail, status, code: `http_${status}` });
}

async function answer(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The service does not answer.", { cause: error });
  }
  if (!response.ok) throw problemOf(response.status, response.statusText, await response.text());
  return response;
}

export const getJson = async (path, signal) => (await answer(path, { signal })).json();
export const getBlob = async (path) => (await answer(path)).blob();
export const remove = (path) => answer(path, { method: "DELETE" });

/** Post, with a body as JSON if there is one; it is sent even if the page is closed meanwhile. */
export async function post(path, body) {
  const options = { method: "POST", keepalive: true };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "Content-Type": "application/json" };
  }
  return (await answer(path, options)).json();
}

/** Whether a problem says that the service is away for a moment, and not that the request is wrong. */
export const isAway = (error) => AWAY_STATUSES.has(error.status);

/** A fresh key, so that a submission repeated after a lost connection makes no second job. */
export function freshKey() {
  // not crypto.randomUUID, which plain http to another machine lacks
  const words = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(words, (word) => word.toString(16).padStart(2, "0")).join("");
}

/** Send a file and a request; resolves to the job. `onSent(share)` follows the upload; aborting rejects with AbortError. */
export function submit(file, name, request, key, { onSent, signal }) {
  return new Promise((resolve, reject) => {
    const form = new FormData();
    form.append("request", new Blob([JSON.stringify(request)], { type: "application/json" }));
    form.append("file", file, name);
    const upload = new XMLHttpRequest(); // fetch tells nothing of an upload's progress
    upload.open("POST", "/v1/probes");
    for (const [header, value] of Object.entries(headers({ "Idempotency-Key": key }))) {
      upload.setRequestHeader(header, value);
    }
    upload.upload.addEventListener("progress", (event) => {
      if (event.lengthComputable) onSent(event.loaded / event.total);
    });
    upload.addEventListener("load", () => {
      if (upload.status >= 200 && upload.status < 300) resolve(JSON.parse(upload.responseText));
      else reject(problemOf(upload.status, upload.statusText, upload.responseText));
    });
    upload.addEventListener("error", () => reject(new Unreachable("The connection was lost during the upload.")));
    upload.addEventListener("abort", () => reject(new DOMException("stopped", "AbortError")));
    signal.addEventListener("abort", () => upload.abort());
    upload.send(form);
  });
}

/**
 * Follow a job to its end. `onJob(job)` at each change; `onLink(connected)` when the connection is lost and when it is
 * back. Reconnects until the job has ended, the signal aborts, or the service says that it does not know the job.
 */
export async function follow(id, { onJob, onLink, signal }) {
  let pause = FIRST_PAUSE_MS;
  let losses = 0;
  while (!signal.aborted) {
    try {
      for await (const job of jobEvents(id, signal)) {
        pause = FIRST_PAUSE_MS;
        losses = 0;
        onLink(true);
        onJob(job);
        if (["succeeded", "failed", "cancelled"].includes(job.state)) return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && !isAway(error)) throw error;
    }
    losses += 1;
    if (losses > 1) onLink(false);
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

async function* jobEvents(id, signal) {
  // fetch, not EventSource: that can send no key, and hides why it failed
  const stop = new AbortController();
  const abort = () => stop.abort();
  signal.addEventListener("abort", abort);
  let silence = setTimeout(abort, SILENCE_MS);
  try {
    const response = await answer(`/v1/probes/${encodeURIComponent(id)}/events`, {
      signal: stop.signal,
      headers: { Accept: "text/event-stream" },
    });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let unread = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(silence);
      silence = setTimeout(abort, SILENCE_MS);
      const blocks = (unread + value).split(/\r\n\r\n|\n\n|\r\r/);
      unread = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r\n|\n|\r/);
        const field = (name) =>
          lines.filter((line) => line.startsWith(`${name}:`)).map((line) => line.slice(name.length + 1).trimStart());
        if (field("event")[0] === "job") yield JSON.parse(field("data").join("\n"));
      }
    }
  } finally {
    clearTimeout(silence);
    signal.removeEventListener("abort", abort);
    stop.abort();
  }
}
