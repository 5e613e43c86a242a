// A job's curves. Steps that a resumed run did again are those it did last.

import { number } from "./words.js";

export class Curves {
  constructor() {
    this.steps = new Map();
    this.evaluations = new Map();
    this.samples = [];
  }

  take(events) {
    for (const event of events) {
      if (event.event === "step") this.steps.set(event.step, event);
      else if (event.event === "eval") this.evaluations.set(event.step, event);
      else if (event.event === "start") this.forget(event.step);
      else if (event.event === "sample") this.samples = [...this.samples.filter((s) => s.step === event.step), event];
    }
  }

  forget(step) {
    for (const kept of [this.steps, this.evaluations]) {
      for (const at of kept.keys()) if (at > step) kept.delete(at);
    }
  }

  of(name) {
    const at = [...new Set([...this.steps.keys(), ...this.evaluations.keys()])].sort((a, b) => a - b);
    return [at, at.map((n) => this.steps.get(n)?.[name] ?? null), at.map((n) => this.evaluations.get(n)?.[`eval_${name}`] ?? null)];
  }

  has(name) {
    return [...this.steps.values()].some((step) => step[name] != null);
  }

  pace() {
    const at = [...this.steps.keys()].sort((a, b) => a - b), all = at.map((n) => this.steps.get(n));
    return [at, all.map((s) => s.step_s ?? null), all.map((s) => s.predicted_step_s ?? null)];
  }
}

export class Chart {
  constructor(figure, lines, height = 200) {
    this.place = figure.querySelector(".chart");
    this.height = height;
    this.lines = lines;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again());
    new ResizeObserver(() => this.plot?.setSize({ width: this.place.clientWidth, height })).observe(this.place);
  }

  again() {
    this.plot?.destroy();
    this.plot = null;
    if (this.data) this.show(this.data);
  }

  // A line is {label, colour, dots, dash}. Other lines than before are drawn anew.
  show(data, lines = this.lines) {
    this.data = data;
    if (data[0].length === 0) {
      this.plot?.destroy();
      this.plot = null;
      this.place.replaceChildren(Object.assign(document.createElement("p"), { textContent: "no step yet" }));
      return;
    }
    if (JSON.stringify(lines) !== JSON.stringify(this.lines)) {
      this.lines = lines;
      this.again();
      return;
    }
    if (this.plot) { this.plot.setData(data); return; }
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    const value = (_, v) => (v == null ? "–" : number(v));
    const series = lines.map(({ label, colour: name, dots, dash }) => ({
      label, value, dash, stroke: colour(name), width: 1.5, spanGaps: true, points: dots ? { show: true, size: 6 } : { show: false },
    }));
    this.place.replaceChildren();
    this.plot = new uPlot({
      width: this.place.clientWidth, height: this.height, scales: { x: { time: false } },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 56 }], series: [{ label: "step" }, ...series],
    }, data, this.place);
  }
}
