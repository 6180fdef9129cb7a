// Charts come from the service as Vega-Lite specifications; the same ones are in report.html and chart.svg.

import { h } from "./dom.js";
import { getJson } from "./api.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
let vegaScript = null;

/** Load the drawing library, once, when the first chart is wanted. */
function vega() {
  vegaScript ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "/assets/vega.js" });
    script.addEventListener("load", () => resolve(window.vegaEmbed));
    script.addEventListener("error", () => {
      vegaScript = null;
      script.remove();
      reject(new Error("the drawing library did not load"));
    });
    document.head.append(script);
  });
  return vegaScript;
}

/** One chart in a figure; drawn again when the curve has grown and when light turns to dark. */
export class Chart {
  constructor(path, name, title, caption) {
    this.path = path;
    this.drawing = false;
    this.outdated = false;
    this.closed = false;
    this.holder = null;
    this.view = null;
    this.canvas = h("div", { class: "chart" });
    this.note = h("p", { class: "hint", hidden: true });
    this.figure = h(
      "figure",
      { class: "card", "data-chart": name, "aria-label": title },
      h("figcaption", {}, h("h2", {}, title), h("p", { class: "hint" }, caption)),
      this.canvas,
      this.note,
    );
    this.redraw = () => this.draw();
    dark.addEventListener("change", this.redraw);
  }

  /** Fetch the chart as it stands now and draw it; asked again meanwhile, it draws once more at the end. */
  async draw() {
    this.outdated = true;
    if (this.drawing) return;
    this.drawing = true;
    while (this.outdated && !this.closed) {
      this.outdated = false;
      try {
        await this.drawOnce();
        this.note.hidden = true;
      } catch (error) {
        this.note.hidden = false;
        this.note.textContent = `This chart could not be drawn (${error.message}). The table has its figures.`;
      }
    }
    this.drawing = false;
  }

  /** Draw beside the old chart, out of sight, and take its place: nothing flickers. */
  async drawOnce() {
    const theme = dark.matches ? "dark" : "light";
    const [specification, vegaEmbed] = await Promise.all([getJson(`${this.path}?theme=${theme}`), vega()]);
    if (this.closed) return;
    const holder = h("div", { class: "drawing" });
    this.canvas.append(holder);
    try {
      const view = await vegaEmbed(holder, specification, {
        ast: true, // no eval, as the page's policy demands
        actions: false,
        renderer: "svg",
        tooltip: { theme },
      });
      this.view?.finalize();
      this.holder?.remove();
      [this.view, this.holder] = [view, holder];
      holder.classList.remove("drawing");
    } catch (error) {
      holder.remove();
      throw error;
    }
  }

  close() {
    dark.removeEventListener("change", this.redraw);
    this.closed = true;
    this.view?.finalize();
  }
}
