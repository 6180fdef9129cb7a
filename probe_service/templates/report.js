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

  for (const code of document.querySelectorAll("details.code")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const text = code.querySelector("pre");
      try {
        await navigator.clipboard.writeText(text.textContent);
        button.textContent = "Copied";
      } catch {
        window.getSelection().selectAllChildren(text); // no clipboard here: the keyboard's copy takes it
        button.textContent = "Selected";
      }
    });
    code.append(button);
  }

  // One drawing after the other; where drawing fails, the static charts stay.
  let queue = Promise.resolve();
  const enqueue = () => {
    queue = queue.then(draw).catch((error) => console.error(error));
  };
  dark.addEventListener("change", enqueue);
  enqueue();
})();
