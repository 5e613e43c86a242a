// The decisions: a row per block, the block's tensors below it when it is clicked.

const HEADINGS = [
  ["block", ""], ["activations", ""], ["kept", "number"], ["weights", ""], ["updated by", ""],
  ["to GPU", "number"], ["to host", "number"], ["forward", "number"], ["backward", "number"],
];
const OPTION_COLOURS = { keep: "activations", recompute: "running", offload: "offloaded" };

function bar(pieces) {
  const whole = pieces.reduce((sum, [, size]) => sum + size, 0);
  return el("span", { className: "bar" },
    ...pieces.filter(([, size]) => size).map(([name, size]) =>
      el("i", { style: { width: `${(100 * size) / whole}%`, background: `var(--${name})` } })));
}

const size = (value) => (value ? bytes(value) : el("span", { className: "none" }, "–"));
const duration = (value) => (value ? seconds(value * 1e9) : el("span", { className: "none" }, "–"));
const cell = (content, className = "") => el("td", { className }, content);

function weightsCell(block) {
  const whole = block.resident_bytes + block.away_once_bytes + block.away_twice_bytes;
  if (!whole) return cell(size(0));
  const pieces = [["weights", block.resident_bytes], ["once", block.away_once_bytes], ["twice", block.away_twice_bytes]];
  const share = block.resident_bytes / whole;
  const text = share > 0.995 ? "resident" : share < 0.005 ? "streamed" : `${percent(share)} resident`;
  return el("td", {}, bar(pieces), `${bytes(whole)}, ${text}`);
}

function updateCell(block) {
  const trained = block.cpu_parameters + block.gpu_parameters;
  if (!trained) return cell(el("span", { className: "none" }, block.parameters ? "frozen" : "–"));
  const share = block.cpu_parameters / trained;
  const text = share === 0 ? "GPU" : share === 1 ? "CPU" : `${percent(share)} CPU`;
  return el("td", {}, bar([["cpu", block.cpu_parameters], ["gpu", block.gpu_parameters]]), text);
}

function optionCell(block) {
  const colour = OPTION_COLOURS[block.option.split("-")[0]] ?? "frame";
  return el("td", {}, el("span", { className: "badge", title: block.treatment }, swatch(colour),
    block.option));
}

function schedule(absences, home) {
  if (!absences.length) return home;
  const text = (absence) => `leaves after ${absence.leaves}, back for ${absence.returns}${absence.next_step ? " (next step)" : ""}`;
  return absences.map(text).join("; ");
}

function tensorRow(tensor, block) {
  const name = tensor.name.startsWith(`${block.name}.`) ? tensor.name.slice(block.name.length + 1) : tensor.name;
  const there = tensor.stored ? `on disk${tensor.trails ? ", updated in the next step" : ""}` : "on the host";
  const states = tensor.updated === "cpu" ? there : schedule(tensor.state_absences, "resident");
  const update = tensor.updated === "cpu"
    ? `CPU, listed at ${tensor.update_stage}; gradient leaves at ${tensor.sent}`
    : tensor.updated === "gpu" ? `GPU, at the end of ${tensor.update_stage}` : "frozen";
  return el("tr", {}, cell(name), cell(bytes(tensor.bytes), "number"),
    cell(schedule(tensor.weight_absences, "resident")), cell(tensor.updated ? states : "–"), cell(update));
}

function details(block) {
  const names = ["tensor", "bytes", "weight", "optimizer states", "update"];
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...names.map((name) => el("th", {}, name)))),
    el("tbody", {}, ...block.tensors.map((tensor) => tensorRow(tensor, block))));
  const inside = block.tensors.length ? table : "No tensors of its own.";
  return el("tr", {}, el("td", { className: "inside", colspan: String(HEADINGS.length) }, inside));
}

function blockRow(block, number) {
  const row = el("tr", { className: "block", tabindex: "0", "aria-expanded": "false" },
    cell(`${number} · ${block.name}`), optionCell(block), cell(size(block.saved_bytes), "number"), weightsCell(block),
    updateCell(block), cell(size(block.up_bytes), "number"), cell(size(block.down_bytes), "number"),
    cell(duration(block.forward_s), "number"), cell(duration(block.backward_s), "number"));
  let below = null;
  const toggle = () => {
    if (below) below.remove();
    below = below ? null : details(block);
    if (below) row.after(below);
    row.classList.toggle("open", Boolean(below));
    row.setAttribute("aria-expanded", String(Boolean(below)));
  };
  row.onclick = toggle;
  row.onkeydown = (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    toggle();
  };
  return row;
}

document.getElementById("blocks").append(
  el("thead", {}, el("tr", {}, ...HEADINGS.map(([name, className]) => el("th", { className, scope: "col" }, name)))),
  el("tbody", {}, ...doc.blocks.map(blockRow)),
);
// Scroll bars of phones are not seen before one scrolls.
{
  const scrolled = document.querySelector(".scroll");
  const look = () => {
    const hidden = scrolled.scrollWidth - scrolled.clientWidth;
    document.getElementById("sideways").hidden = hidden < 2;
    scrolled.classList.toggle("more", scrolled.scrollLeft < hidden - 2);
  };
  new ResizeObserver(look).observe(scrolled);
  new ResizeObserver(look).observe(document.getElementById("blocks"));
  scrolled.addEventListener("scroll", look, { passive: true });
}
document.getElementById("bars").append(
  ...[["weights", "weights that stay"], ["once", "away between two passes"], ["twice", "fetched for each pass"],
    ["cpu", "updated by the CPU"], ["gpu", "by the GPU"]].map(([name, text]) => el("span", {}, swatch(name), text)),
);
