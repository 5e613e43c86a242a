// Headline figures, legends, who is busy, and what the plan rests on.

document.getElementById("machine").textContent = doc.hardware.name;
document.getElementById("summary").textContent = doc.summary;

document.getElementById("figures").append(
  ...doc.figures.map((figure) => {
    const note = figure.note.replace(/ (?=[KMGT]?i?B\b)/g, "\u00a0"); // "9.4 GiB" stays on one line
    const card = el("div", { className: "card" }, el("div", { className: "name" }, figure.name),
      el("div", { className: "value" }, figure.value), el("div", { className: "remark" }, note));
    if (figure.share !== null) card.append(meter(figure.share));
    return card;
  }),
);

function meter(share, className = "meter") {
  return el("div", { className }, el("i", { style: { width: `${Math.min(100, 100 * share)}%` } }));
}

// A legend whose entries make the others fade while the pointer is on them.
function legend(id, label, entries) {
  document.getElementById(id).append(
    el("b", {}, label),
    ...entries.map(([name, text, help, colour]) => {
      const entry = el("span", { className: "live", title: help }, swatch(colour ?? name), text);
      entry.onpointerenter = () => stress(name);
      entry.onpointerleave = () => stress(null);
      return entry;
    }),
  );
}

function stress(name) {
  emphasis = name;
  view.changed();
}

const used = new Set([...lanes, ...(recorded || [])].flatMap((lane) => lane.occasions.map((occasion) => SORTS[ops.sort[occasion % COUNT]])));
legend("sorts", "queues", SORTS.filter((sort) => used.has(sort)).map((sort) => [sort, SORT_NAMES[sort], ""]));
const present = PARTS.filter((_, number) => samples.some((sample) => sample.parts[number]));
legend("parts", "memory", present.map((part) => [part, PART_NAMES[part], PART_HELP[part], PART_COLOURS[part]]));

{
  document.getElementById("loads").append(
    ...doc.loads.flatMap((load) => {
      const mark = load === doc.loads[0] ? " most" : "";
      return [el("div", { className: mark }, load.resource), meter(load.share, `meter${mark}`),
        el("div", { className: `share${mark}` }, `${percent(load.share)} · ${seconds(load.busy_s * 1e9)}`)];
    }),
  );
  document.getElementById("host").hidden = !doc.host_limited;
}

if (doc.measured) {
  const { first_step: first, step_ns: took } = doc.measured;
  const planned = doc.plan.step_s * 1e9;
  const off = took / planned - 1;
  const than = off >= 1 ? `${(1 + off).toPrecision(2)} times as long as planned` : Math.abs(off) < 0.005 ? "as planned"
    : `${percent(Math.abs(off))} ${off > 0 ? "longer" : "shorter"} than planned`;
  const text = document.getElementById("ran");
  text.textContent = `The narrow rows are a run of this plan, its steps ${first} and ${first + 1}: a step took ` +
    `${seconds(took)}, ${than}.` + (doc.measured.paused ? " Between them the run saved or evaluated, which is left out: " +
    "so the first one's updates had to end within it." : "");
  text.hidden = false;
}

// What the GPU waits for in a step: its pauses in the second one, by what ended them.
function pauses() {
  const lane = lanes[ops.queues.indexOf("compute")];
  const found = new Map();
  lane.occasions.forEach((occasion, at) => {
    if (Math.floor(occasion / COUNT) !== FIRST + 1) return;
    for (const { source, ns } of lane.causes[at]) {
      const kind = ops.kinds[ops.kind[source % COUNT]];
      const sort = SORT_NAMES[SORTS[ops.sort[source % COUNT]]];
      const reason = kind === "fetch" ? `for ${sort} to arrive` : kind === "send" ? `until ${sort} have left`
        : `for ${sort}s on the CPU`;
      found.set(reason, (found.get(reason) ?? 0) + ns);
    }
  });
  return [...found].sort(([, a], [, b]) => b - a);
}

{
  const found = pauses();
  const total = found.reduce((sum, [, ns]) => sum + ns, 0);
  const reasons = found.filter(([, ns]) => ns > total / 100).map(([reason, ns]) => `${seconds(ns)} ${reason}`);
  document.getElementById("idle").textContent = total
    ? `The GPU pauses for ${seconds(total)} of a step, ${percent(total / doc.step_ns)}: ${reasons.join(", ")}.`
    : "The GPU never waits.";
}

{
  const { plan, hardware } = doc;
  const rate = (value) => `${bytes(Math.round(value))}/s`;
  const updates = (value) => `${(value / 1e9).toPrecision(3)} billion parameters/s`;
  const facts = [
    ["machine", hardware.name],
    ["times", plan.basis],
    ["host to GPU", rate(hardware.h2d_bytes_per_s)],
    ["GPU to host", rate(hardware.d2h_bytes_per_s)],
    ["host memory", rate(hardware.cpu_memory_bytes_per_s)],
    ["CPU updates", updates(hardware.cpu_update_parameters_per_s)],
    ["GPU updates", updates(hardware.gpu_update_parameters_per_s)],
    ["found by", plan.source || "hand"],
  ];
  if (plan.bound_s) facts.push(["bound", `${seconds(plan.bound_s * 1e9)} for any schedule`]);
  if (plan.lp_step_s) {
    facts.push(["integer program", `${seconds(plan.lp_step_s * 1e9)} before rounding to whole tensors, solved to ` +
      `${(100 * plan.solver_gap).toFixed(2)}% of its own optimum`]);
  }
  const pair = ([name, value]) => [el("dt", {}, name), el("dd", {}, value)];
  document.getElementById("facts").append(...facts.flatMap(pair));
}
