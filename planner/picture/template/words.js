// Numbers and operations in words, and elements of the page.

function bytes(count) {
  for (const [unit, factor] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= factor) return `${(Math.ceil((count * 10) / factor) / 10).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}

function seconds(ns) {
  const s = ns / 1e9;
  if (s < 1e-3) return `${Number((s * 1e6).toPrecision(3))} µs`;
  if (s < 1) return `${Number((s * 1e3).toPrecision(3))} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const minutes = Math.round(s / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

// A point in time with as many digits as something of this length needs.
function moment(at, length) {
  const [factor, unit] = at >= 1e9 ? [1e9, "s"] : at >= 1e6 ? [1e6, "ms"] : [1e3, "µs"];
  const digits = Math.ceil(-Math.log10(length / 10 / factor));
  return `${(at / factor).toFixed(Math.min(6, Math.max(0, digits)))} ${unit}`;
}

function percent(share) {
  if (share > 0 && share < 0.001) return "< 0.1%";
  return `${(100 * share).toFixed(share >= 0.1 || share === 0 ? 0 : 1)}%`;
}
const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;

const SORT_NAMES = {
  forward: "forward", head: "head and loss", backward: "backward", update: "optimizer update", weights: "weights",
  gradients: "gradients", states: "optimizer states", activations: "activations", norm: "gradient norm",
};
const PART_NAMES = {
  frame: "frame", weights: "weights", gradients: "gradients", states: "optimizer states", saved: "saved activations",
  offloaded: "activations in flight", waiting: "between blocks", running: "running turn",
};
const PART_HELP = {
  frame: "the rest of the model’s forward: always there",
  weights: "weights of the blocks that are on the GPU now",
  gradients: "finished or growing sums of gradients",
  states: "optimizer states of the blocks that are on the GPU now",
  saved: "activations that stay on the GPU from forward to backward",
  offloaded: "offloaded activations on their way to the host or back",
  waiting: "what slices hold that wait for the next block",
  running: "what the running block needs while it runs",
};
const PART_COLOURS = { saved: "activations" };
const QUEUE_NAMES = { compute: "GPU computes", h2d: "copies to GPU", d2h: "copies to host", cpu: "CPU updates", disk_read: "reads from disk", disk_write: "writes to disk" };
const DIRECTIONS = { F: "forward", B: "backward", H: "head and loss" };

const blockName = (number) => doc.blocks[number]?.name ?? `block ${number}`;

// "l3.up" of "w:l3.up"; "layer3, slice 1" of "a:4.1".
function itemName(item) {
  const name = item.slice(2);
  switch (item[0]) {
    case "w": return `weight ${name}`;
    case "g": return `gradient of ${name}`;
    case "s": return `optimizer states of ${name}`;
    default: {
      const [block, slice] = name.split(".");
      return `activations of ${blockName(Number(block))}${doc.plan.slices > 1 ? `, slice ${slice}` : ""}`;
    }
  }
}

function turnName(subject) {
  const [block, slice] = subject.slice(1).split(".");
  const name = blockName(Number(block));
  const part = subject[0] === "H" ? `${name} with its loss, both ways` : `${DIRECTIONS[subject[0]]} of ${name}`;
  return doc.plan.slices > 1 ? `${part}, slice ${slice}` : part;
}

function tensorsName(subject) {
  const names = subject.split(",");
  return names.length === 1 ? names[0] : count(names.length, "tensor");
}

// A few words for an operation, starting small.
function opName(op) {
  const subject = ops.subject[op];
  switch (ops.kinds[ops.kind[op]]) {
    case "run": return turnName(subject);
    case "fetch": return `${itemName(subject)} to the GPU`;
    case "send": return `${itemName(subject)} to the host`;
    case "alloc": return `room on the GPU for ${itemName(subject)}`;
    case "free": return `release of ${itemName(subject)}`;
    case "update": return `update of ${tensorsName(subject)} on the GPU`;
    case "cpu_update": return `update of ${tensorsName(subject)} on the CPU`;
    case "cpu_ahead": return `update of ${tensorsName(subject)} on the CPU, ahead of the norm`;
    case "cpu_weight": return `update of ${tensorsName(subject)} on the CPU, its states left as they are`;
    case "cpu_states": return `update of the states of ${tensorsName(subject)} on the CPU, of the step before`;
    case "read": case "peek": return `${itemName(subject)} from disk`;
    case "write": return `${itemName(subject)} to disk`;
    case "cpu_replay": return `update of ${tensorsName(subject)} once more, where the norm clips`;
    case "norm": return `norm of the gradients of ${tensorsName(subject)}`;
    default: return "the norm of all gradients";
  }
}

// Why something had to wait for this operation.
function causeName(op) {
  const stage = STAGES[ops.stage[op]];
  return ops.kinds[ops.kind[op]] === "alloc" ? `its memory, set aside when ${stage} begins` : opName(op);
}

// What could stand on a bar, the longest first: "model.layers.9.mlp.up_proj.weight", "mlp.up_proj", "up_proj".
function barNames(op) {
  const subject = ops.subject[op];
  const kind = ops.kinds[ops.kind[op]];
  if (kind === "run") return [capital(turnName(subject)), doc.plan.slices > 1 ? subject : subject.split(".")[0]];
  if (subject.includes(",")) return [tensorsName(subject)];
  if (subject.startsWith("a:")) return [blockName(Number(subject.slice(2).split(".")[0]))];
  const name = kind === "update" || kind.startsWith("cpu_") ? subject : subject.slice(2);
  const parts = name.replace(/\.weight$/, "").split(".");
  return [name, parts.slice(-2).join("."), parts.at(-1)];
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);

// An element with attributes and children; strings become text, never markup.
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(made.style, value);
    else if (name === "className") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const swatch = (sort) => el("i", { style: { background: `var(--${sort})` } });
