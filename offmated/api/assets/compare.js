// Several jobs beside each other: their losses in one chart, and the keys in which they differ.

import { Chart } from "./charts.js";
import { element, find } from "./dom.js";
import { differing, keysOf } from "./keys.js";
import { printable } from "./words.js";

const MOST = 8; // as many as there are colours
const places = Array(MOST).fill(null); // a job keeps its place, and so its colour, for as long as it is chosen
const known = new Map(); // the jobs as the lists had them last
const chart = new Chart(find("#compare"), [], 280);

// The box that chooses a job.
export function box(job, name, done) {
  const made = element("input"), at = places.indexOf(job.id), what = `Compare ${name}`;
  known.set(job.id, { job, name });
  made.type = "checkbox";
  made.checked = at >= 0;
  made.disabled = at < 0 && !places.includes(null);
  made.title = made.disabled ? `${MOST} jobs can be compared` : printable(what);
  made.setAttribute("aria-label", printable(what));
  made.dataset.at = `compare-${job.id}`;
  if (at >= 0) made.style.accentColor = `var(--run-${at + 1})`;
  made.onchange = () => {
    if (made.checked) places[places.indexOf(null)] = job.id;
    else places[places.indexOf(job.id)] = null;
    done();
  };
  return made;
}

export function chooseNone() { places.fill(null); }

// `isLatest`: whether what is read by then is still to be shown.
export async function showComparison(curvesOf, isLatest) {
  const chosen = places.flatMap((id, at) => (id === null ? [] : [{ ...known.get(id), colour: `run-${at + 1}` }]));
  const all = await Promise.all(chosen.map(async ({ job }) => [await curvesOf(job.id), await keysOf(job)]));
  if (!isLatest()) return;
  const section = find("#compare"), several = chosen.length > 1;
  section.hidden = chosen.length === 0;
  section.querySelector(".quiet").hidden = several;
  for (const part of section.querySelectorAll(".chart, .differing")) part.hidden = !several;
  if (!several) return;
  const lines = [], tables = [];
  chosen.forEach(({ name, colour }, number) => {
    const [at, training, evaluation] = all[number][0].of("loss"), label = printable(name);
    lines.push({ label, colour });
    tables.push([at, training]);
    if (evaluation.some((loss) => loss !== null)) {
      lines.push({ label: `${label}, evaluation`, colour, dots: true, dash: [6, 4] });
      tables.push([at, evaluation]);
    }
  });
  chart.show(uPlot.join(tables), lines);
  showDiffering(section.querySelector(".differing"), chosen.map(({ name }) => name), all.map(([, keys]) => keys));
}

function showDiffering(place, names, all) {
  const rows = differing(all), text = JSON.stringify([names, rows]);
  if (place.shown === text) return;
  place.shown = text;
  const cells = (name, words, scope) => words.map((word, at) => {
    const made = element(at === 0 || scope === "col" ? "th" : name, word);
    if (made.localName === "th") made.scope = scope;
    return made;
  });
  const row = (words, scope) => { const made = element("tr"); made.append(...cells("td", words, scope)); return made; };
  place.querySelector("thead").replaceChildren(row(["Key", ...names], "col"));
  place.querySelector("tbody").replaceChildren(...rows.map((words) => row(words, "row")));
  place.querySelector("table").hidden = rows.length === 0;
  place.querySelector("p").textContent = rows.length === 0 ? "All keys are the same." : "Keys that differ";
}
