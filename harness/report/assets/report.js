"use strict";
// Draws every chart from the specifications in the page. SVG, so that text follows the colour scheme.
(async () => {
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const places = [...document.querySelectorAll("[data-chart]")];
  for (const place of places) {
    await vegaEmbed(place, specs[Number(place.dataset.chart)], { renderer: "svg", actions: false, mode: "vega-lite" });
    // The place has a text alternative; what is inside it is a picture.
    place.querySelector("svg").setAttribute("aria-hidden", "true");
  }
  document.documentElement.dataset.drawn = String(places.length);
})().catch((error) => {
  document.documentElement.dataset.failed = String(error);
  console.error(error);
});
// Folded parts are printed too.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
