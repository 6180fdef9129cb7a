"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  async function draw() {
    const theme = dark.matches ? "dark" : "light";
    for (const [name, spec] of Object.entries(specs[theme])) {
      const figure = document.getElementById(`chart-${name}`);
      const result = await window.vegaEmbed(figure.querySelector(".chart-live"), spec, {
        ast: true, // expressions are interpreted: no eval, so the policy of this page holds
        actions: false,
        renderer: "svg",
        defaultStyle: false,
        tooltip: { theme: "report", disableDefaultStyle: true },
      });
      drawn.get(name)?.finalize();
      drawn.set(name, result);
      figure.classList.add("drawn");
    }
    document.documentElement.dataset.charts = theme;
  }

  // One drawing after the other; where drawing fails, the static charts stay.
  let queue = Promise.resolve();
  const enqueue = () => {
    queue = queue.then(draw).catch((error) => console.error(error));
  };
  dark.addEventListener("change", enqueue);
  enqueue();
})();
