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
  constructor(jobId, name, title, caption) {
    this.path = `/v1/probes/${encodeURIComponent(jobId)}/charts/${name}.json`;
    this.drawing = 0;
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

  /** Fetch the chart as it stands now and draw it; the old one stays until the new one is there. */
  async draw() {
    const drawing = ++this.drawing;
    let holder = null;
    try {
      const [specification, vegaEmbed] = await Promise.all([
        getJson(`${this.path}?theme=${dark.matches ? "dark" : "light"}`),
        vega(),
      ]);
      if (drawing !== this.drawing) return; // a newer drawing has begun
      holder = h("div", { class: "drawing" });
      this.canvas.append(holder);
      const view = await vegaEmbed(holder, specification, {
        ast: true, // no eval, as the page's policy demands
        actions: false,
        renderer: "svg",
        tooltip: { theme: dark.matches ? "dark" : "light" },
      });
      if (drawing !== this.drawing) {
        view.finalize();
        holder.remove();
        return;
      }
      this.view?.finalize();
      this.holder?.remove();
      holder.classList.remove("drawing");
      [this.view, this.holder] = [view, holder];
      this.note.hidden = true;
    } catch (error) {
      holder?.remove();
      if (drawing !== this.drawing) return;
      this.note.hidden = false;
      this.note.textContent = `This chart could not be drawn (${error.message}). The table has its figures.`;
    }
  }

  close() {
    dark.removeEventListener("change", this.redraw);
    this.drawing += 1;
    this.view?.finalize();
  }
}
