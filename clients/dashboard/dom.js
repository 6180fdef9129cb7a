// Building elements. Text reaches the page only through text nodes, so nothing in a corpus can become markup.

export const byId = (id) => document.getElementById(id);

/** Make an element: h("p", {class: "hint"}, "text", otherElement). Functions become listeners; null is left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  fill(element, ...children);
  return element;
}

/** Replace what an element holds. */
export function fill(element, ...children) {
  const present = children.flat(Infinity).filter((child) => child !== null && child !== undefined);
  element.replaceChildren(...present.map((child) => (typeof child === "string" ? visible(child) : child)));
}

/** A text in which no character can steer the line around it: bidirectional overrides and controls become U+FFFD. */
export function visible(text) {
  return text.replace(/[\t\n\r\u0085\u2028\u2029]/g, " ").replace(/(?![\u200c\u200d])\p{C}/gu, "\ufffd");
}

/** Set a text only when it changes, so that screen readers speak only of news. */
export function say(element, text) {
  const shown = visible(text);
  if (element.textContent !== shown) element.textContent = shown;
}

// ------------------------------------------------------------------------------------------------ figures in words

export const count = (number) => number.toLocaleString("en");

export const plural = (number, one, many) => `${count(number)} ${number === 1 ? one : many}`;

export function share(value) {
  if (value === 0) return "0";
  return Math.abs(value) < 0.001 ? value.toPrecision(1) : value.toFixed(3);
}

/** An estimate with its interval, e.g. "0.310 (0.301–0.319)". */
export function estimate(figure, format = share) {
  if (figure === null || figure === undefined) return "–";
  if (figure.low === null) return format(figure.value);
  const ends = `${format(figure.low)}–${format(figure.high)}`;
  return figure.low === figure.high ? format(figure.value) : `${format(figure.value)} (${ends})`;
}

/** A clause as a sentence of its own. */
export function sentence(clause) {
  const whole = clause.charAt(0).toUpperCase() + clause.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

export function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) {
    number /= 1000;
    unit += 1;
  }
  return unit === 0 ? plural(number, "byte", "bytes") : `${number.toFixed(number < 10 ? 1 : 0)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 1) return "a moment";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function when(timestamp) {
  const date = new Date(timestamp);
  return Number.isNaN(date.getTime()) ? timestamp : date.toLocaleString();
}
