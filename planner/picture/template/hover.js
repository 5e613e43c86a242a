// What is under the pointer: a frame around it, arrows from what it waited for, and a few words.

const tip = document.getElementById("tip");
const pointer = { x: 0, y: 0, clientX: 0, clientY: 0, inside: false };

function laneAt(y) {
  return LANES.map(([queue]) => queue).find((queue) => y >= rows[queue].top && y < rows[queue].top + rows[queue].height);
}

// What ran at a place of the rows of what was recorded: the bar, or the pause before the next one.
function ranAt(x, y) {
  const queue = recorded && LANES.map(([name]) => name)
    .find((name) => y >= rows[name].ran.top && y < rows[name].ran.top + rows[name].ran.height);
  if (!queue || x < view.left || x > view.left + view.width) return null;
  const lane = recorded[ops.queues.indexOf(queue)];
  const at = timeAt(x);
  const reach = (2 / view.width) * (view.end - view.start);
  const number = rank(lane.starts, at + reach) - 1;
  return number >= 0 && lane.ends[number] >= at - reach ? { queue, lane, at: number } : { queue, lane, at: -1 };
}

function ranWords({ queue, lane, at }) {
  if (at < 0) return [title(`Nothing ran: ${QUEUE_NAMES[queue]}`)];
  const occasion = lane.occasions[at];
  const op = occasion % COUNT;
  const length = lane.ends[at] - lane.starts[at];
  const planned = endOf(occasion) - startOf(occasion);
  const number = doc.measured.first_step + Math.floor(occasion / COUNT) - FIRST;
  const kind = ops.kinds[ops.kind[op]];
  const copied = ops.bytes[op] && (kind === "fetch" || kind === "send")
    ? [line("bytes", `${bytes(ops.bytes[op])}, ${bytes(Math.round((ops.bytes[op] / length) * 1e9))}/s`)] : [];
  return [title(capital(opName(op)), SORTS[ops.sort[op]]), el("table", {}, line("ran in", `step ${number} of the run`),
    ...copied, line("took", seconds(length)), line("planned", planned ? seconds(planned) : "no time"))];
}

// The bar at a place, or the pause before the next one. Thin bars are met within two pixels.
function find(x, y) {
  const queue = laneAt(y);
  if (!queue || x < view.left || x > view.left + view.width) return null;
  const number = ops.queues.indexOf(queue);
  const lane = lanes[number];
  const at = timeAt(x);
  const reach = (2 / view.width) * (view.end - view.start);
  const next = rank(lane.ends, at);
  if (next < lane.occasions.length && lane.starts[next] <= at) return { queue, lane, at: next, idle: false };
  if (next < lane.occasions.length && lane.starts[next] - at < reach) return { queue, lane, at: next, idle: false };
  if (next > 0 && at - lane.ends[next - 1] < reach) return { queue, lane, at: next - 1, idle: false };
  return { queue, lane, at: next, idle: true };
}

function sampleAt(ns) {
  const number = rank(sampleStarts, ns) - 1;
  return number >= 0 && samples[number].end >= ns ? samples[number] : null;
}

function paintOver() {
  const c = context(over, chartBox.clientWidth, heightOfAll);
  if (!pointer.inside || fingers.size) {
    tip.hidden = true;
    return;
  }
  const found = find(pointer.x, pointer.y);
  const { top, height } = rows.memory;
  const within = pointer.x >= view.left && pointer.x <= view.left + view.width;
  const sample = within && pointer.y >= top - 4 && pointer.y <= top + height ? sampleAt(timeAt(pointer.x)) : null;
  if (within) {
    c.fillStyle = colours.text;
    c.globalAlpha = 0.35;
    c.fillRect(pointer.x - 0.5, AXIS, 1, heightOfAll - AXIS);
    c.globalAlpha = 1;
  }
  if (found && !found.idle) paintArrows(c, found.lane.occasions[found.at], found.queue);
  const ran = found ? null : ranAt(pointer.x, pointer.y);
  const words = ran ? ranWords(ran) : found ? (found.idle ? idleWords(found) : barWords(found)) : sample ? memoryWords(sample) : null;
  tip.hidden = !words;
  if (words) {
    tip.replaceChildren(...words);
    placeTip();
  }
}

function placeTip() {
  const { offsetWidth: width, offsetHeight: height } = tip;
  const right = pointer.clientX + 18;
  const below = pointer.clientY + 18;
  tip.style.left = `${Math.max(6, right + width > innerWidth - 6 ? pointer.clientX - width - 14 : right)}px`;
  tip.style.top = `${Math.max(6, below + height > innerHeight - 6 ? pointer.clientY - height - 14 : below)}px`;
}

// Solid arrows from what the bar waited for, faint ones to what waited for the bar.
function paintArrows(c, occasion, queue) {
  const middle = (name) => rows[name].top + rows[name].height / 2;
  const queueOf = (each) => ops.queues[ops.queue[each % COUNT]];
  c.save();
  c.beginPath();
  c.rect(view.left, AXIS, view.width, heightOfAll);
  c.clip();
  for (const source of waitsOf(occasion)) {
    arrow(c, xOf(endOf(source)), middle(queueOf(source)), xOf(startOf(occasion)), middle(queue), 0.95);
  }
  for (const target of waitedOnBy(occasion).slice(0, 40)) {
    arrow(c, xOf(endOf(occasion)), middle(queue), xOf(startOf(target)), middle(queueOf(target)), 0.4);
  }
  const x = xOf(startOf(occasion));
  c.strokeStyle = colours.text;
  c.lineWidth = 2;
  c.strokeRect(x, rows[queue].top, Math.max(2, xOf(endOf(occasion)) - x), rows[queue].height);
  c.restore();
}

function arrow(c, x0, y0, x1, y1, strength) {
  const bend = Math.max(14, Math.min(60, Math.abs(x1 - x0) / 2));
  c.globalAlpha = strength;
  c.strokeStyle = c.fillStyle = colours.text;
  c.lineWidth = 1.6;
  c.beginPath();
  c.moveTo(x0, y0);
  c.bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1 - 5, y1);
  c.stroke();
  c.beginPath();
  c.moveTo(x1, y1);
  c.lineTo(x1 - 7, y1 - 4);
  c.lineTo(x1 - 7, y1 + 4);
  c.fill();
  c.beginPath();
  c.arc(x0, y0, 2.5, 0, 7);
  c.fill();
  c.globalAlpha = 1;
}

const STEP_NAMES = { "-1": "the step before", 0: "the step", 1: "the next step" };
const line = (name, ...value) => el("tr", {}, el("td", {}, name), el("td", {}, ...value));
const title = (text, sort) => el("strong", {}, ...(sort ? [swatch(sort)] : []), text);
function barWords({ lane, at }) {
  const occasion = lane.occasions[at];
  const op = occasion % COUNT;
  const stage = STAGES[ops.stage[op]];
  const kind = ops.kinds[ops.kind[op]];
  const step = Math.floor(occasion / COUNT) - FIRST;
  const length = lane.ends[at] - lane.starts[at];
  const lines = [];
  if (kind === "run") {
    const block = doc.blocks[Number(stage.slice(1))];
    lines.push(line("block", `${block.name}: ${block.treatment}`));
  } else {
    lines.push(line("listed at", `${stage}, the ${turnName(`${stage}.0`).replace(/, slice 0$/, "")}`));
  }
  if (ops.bytes[op] && (kind === "fetch" || kind === "send")) {
    lines.push(line("bytes", `${bytes(ops.bytes[op])}, ${bytes(Math.round((ops.bytes[op] / length) * 1e9))}/s`));
  }
  const names = ops.subject[op].split(",");
  if (names.length > 1) lines.push(line("tensors", names.slice(0, 8).join(", ") + (names.length > 8 ? " …" : "")));
  lines.push(line("takes", seconds(length)));
  const from = lane.starts[at] - step * doc.step_ns;
  lines.push(line("from", `${moment(from, length)} to ${moment(from + length, length)} of ${STEP_NAMES[step] ?? "a later step"}`));
  const causes = lane.causes[at];
  const late = causes.reduce((sum, cause) => sum + cause.ns, 0);
  const why = [el("p", {}, late ? waitWords(causes) : "Did not wait: it began when its queue was free.")];
  return [title(capital(opName(op)), SORTS[ops.sort[op]]), el("table", {}, ...lines), ...why];
}

function waitWords(causes) {
  const total = causes.reduce((sum, cause) => sum + cause.ns, 0);
  const reasons = causes.map((cause) => causeName(cause.source % COUNT));
  const longest = causes.reduce((a, b) => (b.ns > a.ns ? b : a)).source % COUNT;
  const more = new Set(reasons).size > 1 ? `, and ${new Set(reasons).size - 1} more` : "";
  return `Waited ${seconds(total)} for ${causeName(longest)}${more}.`;
}

function idleWords({ queue, lane, at }) {
  if (!lane.occasions.length) return [title(`Not used by this plan: ${QUEUE_NAMES[queue]}`)];
  if (at >= lane.occasions.length) return [title("Nothing more"), el("div", {}, "What follows is the next step again.")];
  const causes = lane.causes[at];
  const length = lane.starts[at] - (at ? lane.ends[at - 1] : 0);
  const next = capital(opName(lane.occasions[at] % COUNT));
  const about = el("table", {}, line("for", seconds(length)), line("then", next));
  const why = causes.length ? [el("p", {}, waitWords(causes))] : [];
  return [title(`Nothing to do: ${QUEUE_NAMES[queue]}`), about, ...why];
}

function memoryWords(sample) {
  const budget = doc.plan.gpu_budget_bytes;
  const parts = PARTS.map((name, number) => [name, sample.parts[number]]).filter(([, size]) => size).reverse();
  const lines = parts.map(([name, size]) =>
    el("tr", {}, el("td", {}, swatch(PART_COLOURS[name] ?? name), PART_NAMES[name]),
      el("td", { className: "right" }, bytes(size))),
  );
  const free = budget ? [el("p", {}, `${bytes(Math.max(0, budget - sample.total))} below the budget`)] : [];
  return [title(`${bytes(sample.total)} on the GPU${sample === peakSample ? ", the peak" : ""}`),
    el("table", {}, ...lines), ...free];
}

function point(event) {
  const box = chartBox.getBoundingClientRect();
  pointer.x = event.clientX - box.left;
  pointer.y = event.clientY - box.top;
  pointer.clientX = event.clientX;
  pointer.clientY = event.clientY;
  pointer.inside = true;
  soon();
}
chartBox.addEventListener("pointermove", point);
chartBox.addEventListener("pointerup", point);
chartBox.addEventListener("pointerleave", () => {
  pointer.inside = false;
  soon();
});
