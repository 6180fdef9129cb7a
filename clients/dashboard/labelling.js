// Labelling: one pair at a time, by key or button. Each answer is sent at once; what is stored survives a reload.

import { byId, count, fill, h, say } from "./dom.js";
import { Unreachable, getJson, isAway, post } from "./api.js";

const FETCHED_AT_ONCE = 20;
const RETRY_MS = 2000;

const ANSWERS = [
  ["yes", "y", "Yes"],
  ["no", "n", "No"],
  ["unsure", "u", "Unsure"],
];
const BACK_KEYS = ["b", "arrowleft", "backspace"];

/** Shows the questions of an audit; `onDone` once all are answered and stored, `onError` when it cannot go on. */
export class Labelling {
  constructor(path, { onDone, onError, signal }) {
    Object.assign(this, { path, onDone, onError, signal });
    this.ahead = []; // questions to show next: open ones, and those that Back came from
    this.past = []; // shown before the present one, since the page was loaded
    this.current = null;
    this.counts = { questions: 0, answered: 0, open: 0 };
    this.unsent = [];
    this.sending = null;
    this.build();
  }

  /** Whether an answer is not stored yet. */
  get hasUnsent() {
    return this.unsent.length > 0;
  }

  build() {
    this.place = h("strong", { id: "question-place" });
    this.left = h("span", { class: "hint" });
    this.doneButton = h(
      "button",
      { type: "button", hidden: true, click: () => this.guarded(() => this.send().then(() => this.onDone())) },
      "Show the result",
    );
    this.bar = h("progress", { max: 1, value: 0, "aria-label": "Questions answered" });
    this.texts = h("div", { class: "texts", "aria-live": "polite", "aria-atomic": "true" });
    this.buttons = new Map(
      ANSWERS.map(([word, key, name]) => [
        word,
        h("button", { type: "button", "aria-keyshortcuts": key, click: () => this.answer(word) }, name, " ", h("kbd", {}, key)),
      ]),
    );
    this.backButton = h(
      "button",
      { type: "button", class: "quiet", "aria-keyshortcuts": "b", click: () => this.back() },
      "Back ",
      h("kbd", {}, "b"),
    );
    this.element = h(
      "section",
      { class: "card question", "aria-labelledby": "question-title" },
      h("div", { class: "progress-line" }, this.place, this.left, this.doneButton),
      this.bar,
      h("h2", { id: "question-title" }, "Would you accept B as a positive for A?"),
      h("p", { class: "hint" }, "Yes if B means the same, so that training must not push it away from A; no if it means something else."),
      this.texts,
      h("div", { class: "answers" }, ...this.buttons.values(), this.backButton),
    );
  }

  /** Begin with the first open question, or with the last one of all, to change answers. */
  async start({ atEnd = false } = {}) {
    await this.guarded(async () => {
      if (!atEnd) return this.next();
      const { counts } = await this.fetch("limit=1");
      return this.show(await this.before(counts.questions + 1));
    });
  }

  /** The question before a place of the sheet, with its answer. */
  async before(number) {
    await this.send();
    return (await this.fetch(`offset=${number - 2}&limit=1`)).questions[0];
  }

  async fetch(query) {
    const page = await getJson(`${this.path}/pairs?${query}`, this.signal);
    this.counts = page.counts;
    return page;
  }

  async next() {
    if (this.ahead.length === 0) {
      this.current = null;
      await this.send(); // else the service would name questions as open that were answered just now
      this.ahead = (await this.fetch(`open_only=true&limit=${FETCHED_AT_ONCE}`)).questions;
    }
    const question = this.ahead.shift();
    if (question === undefined) this.onDone();
    else this.show(question);
  }

  answer(word) {
    const question = this.current;
    if (question === null) return;
    if (question.answer === null) {
      this.counts.answered += 1;
      this.counts.open -= 1;
    }
    question.answer = word;
    this.past.push(question);
    this.unsent.push({ id: question.id, answer: word });
    this.guarded(() => this.send());
    this.guarded(() => this.next());
  }

  back() {
    const { current } = this;
    if (current === null || current.number === 1) return;
    this.current = null;
    this.guarded(async () => {
      this.ahead.unshift(current);
      this.show(this.past.pop() ?? (await this.before(current.number)));
    });
  }

  show(question) {
    this.current = question;
    const { questions, answered, open } = this.counts;
    say(this.place, `Question ${count(question.number)} of ${count(questions)}`);
    say(this.left, open === 0 ? "" : `${count(open)} to go`);
    this.doneButton.hidden = open > 0;
    this.bar.max = questions;
    this.bar.value = answered;
    const side = (title, text, more = "") =>
      // A corpus may hold anything: shown as text only, in its own direction.
      h("div", { class: `side ${more}` }, h("h3", {}, title), h("p", { dir: "auto", tabindex: "0" }, text));
    fill(
      this.texts,
      side("A", question.anchor),
      question.positive === null ? null : side("A known positive of A", question.positive, "known"),
      side("B", question.candidate),
    );
    this.buttons.forEach((button, word) => button.setAttribute("aria-pressed", String(question.answer === word)));
    this.backButton.disabled = question.number === 1;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return; // a key held down answers once
    if (event.target.closest?.("input, select, textarea")) return;
    const pressed = event.key.toLowerCase();
    const answer = ANSWERS.find(([, key]) => key === pressed);
    if (answer) this.answer(answer[0]);
    else if (BACK_KEYS.includes(pressed)) this.back();
    else return;
    event.preventDefault();
  }

  /** Send what is not stored yet, one request after the other, so that a later answer arrives later. */
  send() {
    this.sending ??= this.sendAll().finally(() => {
      this.sending = null;
    });
    return this.sending;
  }

  async sendAll() {
    const notice = byId("link-notice");
    while (this.unsent.length > 0) {
      const batch = [...this.unsent];
      try {
        await post(`${this.path}/labels`, batch);
        this.unsent.splice(0, batch.length);
        notice.hidden = true;
      } catch (error) {
        if (!(error instanceof Unreachable) && !isAway(error)) {
          this.unsent = [];
          throw error;
        }
        notice.hidden = false;
        say(notice, "The service does not answer. Your last answers are kept in this page and sent when it is back.");
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }

  async guarded(work) {
    try {
      await work();
    } catch (error) {
      if (!this.signal.aborted) this.onError(error);
    }
  }
}
