// Draws queues and memory on one canvas, the strip of both steps on another.

const base = document.getElementById("base");
const over = document.getElementById("over");
const AXIS = 24;
const RULER = 20;
const LANES = [["compute", 46], ["h2d", 34], ["d2h", 34], ["cpu", 34], ["disk_read", 34], ["disk_write", 34]]
  .filter(([queue]) => !queue.startsWith("disk") || ops.queue.includes(ops.queues.indexOf(queue)));
const GAP = 8;
const RAN = 16; // a row of what was recorded, below what was planned
const MEMORY = 218;
const TITLE = 17; // a line of words above the memory: what it is, and below that a budget that is out of sight
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";
const SMALL = FONT.replace("12px", "11px");

const rows = {};
let heightOfAll = AXIS + RULER + 4;
for (const [queue, height] of LANES) {
  rows[queue] = { top: heightOfAll, height };
  if (recorded) {
    heightOfAll += height + 2;
    rows[queue].ran = { top: heightOfAll, height: RAN };
    heightOfAll += RAN + GAP + 4;
  } else heightOfAll += height + GAP;
}
heightOfAll += 2 * TITLE;
rows.memory = { top: heightOfAll, height: MEMORY };
heightOfAll += MEMORY + 6;

let colours = {};
let emphasis = null; // a sort or part that the pointer is on in a legend: the others fade

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["panel", "line", "text", "quiet", "track", "accent", "limit", ...SORTS, ...PARTS];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  colours.saved = colours[PART_COLOURS.saved];
  colours.inks = Object.fromEntries([...SORTS, ...PARTS].map((name) => [name, ink(colours[name])]));
}

// Black or white, whichever reads better on `colour` (#rrggbb).
function ink(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.3 ? "#10151d" : "#ffffff";
}

function context(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const c = canvas.getContext("2d");
  c.scale(ratio, ratio);
  c.textBaseline = "middle";
  c.font = FONT;
  return c;
}

function measure() {
  const width = chartBox.clientWidth;
  view.left = width < 640 ? 60 : 118;
  view.width = Math.max(50, width - view.left - 14);
  return width;
}

// Round numbers `distance` pixels or more apart: their step.
function tick(range, distance, length) {
  const rough = (range * distance) / length;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function paint() {
  const width = measure();
  const c = context(base, width, heightOfAll);
  c.fillStyle = colours.panel;
  c.fillRect(0, 0, width, heightOfAll);
  paintTimes(c);
  c.save();
  c.beginPath();
  c.rect(view.left, 0, view.width, heightOfAll);
  c.clip();
  paintPhases(c);
  for (const [queue] of LANES) {
    const number = ops.queues.indexOf(queue);
    paintLane(c, lanes[number], rows[queue]);
    if (recorded) paintLane(c, recorded[number], rows[queue].ran, false);
  }
  paintMemory(c, rows.memory, view.start, view.end);
  paintSteps(c);
  c.restore();
  paintNames(c);
  paintLimits(c);
  paintStrip(width);
}

function paintTimes(c) {
  const range = view.end - view.start;
  const minute = range > 1.2e12 ? 60 : 1;
  const step = minute * tick(range / minute, 90, view.width);
  c.fillStyle = colours.quiet;
  c.textAlign = "center";
  c.font = SMALL;
  for (let at = Math.ceil(view.start / step) * step; at <= view.end; at += step) {
    const x = xOf(at);
    c.fillStyle = colours.line;
    c.fillRect(x, AXIS - 5, 1, heightOfAll - AXIS);
    c.fillStyle = colours.quiet;
    if (x > view.left + 14 && x < view.left + view.width - 14) c.fillText(timeText(at, step), x, 9);
  }
}

// A tick with as many digits as tell it from its neighbours.
function timeText(at, step) {
  const [factor, unit] = step >= 6e10 ? [6e10, "min"] : step >= 1e8 ? [1e9, "s"] : step >= 1e5 ? [1e6, "ms"] : [1e3, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step / factor) + 1e-9));
  return `${(at / factor).toFixed(digits)} ${unit}`;
}

function paintPhases(c) {
  c.font = SMALL;
  for (const phase of phases) {
    const x = xOf(phase.start);
    const end = xOf(phase.end);
    if (end < view.left || x > view.left + view.width) continue;
    c.globalAlpha = 0.28;
    c.fillStyle = colours[phase.sort];
    c.fillRect(x, AXIS + 1, Math.max(1, end - x - 1), RULER - 4);
    c.globalAlpha = 1;
    const from = Math.max(x, view.left);
    const room = Math.min(end, view.left + view.width) - from;
    if (room > c.measureText(phase.name).width + 10) {
      c.fillStyle = colours.text;
      c.textAlign = "center";
      c.fillText(phase.name, from + room / 2, AXIS + 1 + (RULER - 4) / 2);
    }
  }
}

// Neighbours of one sort that are too close to tell apart become one bar. Bars thinner than a pixel are as pale as they
// are thin, so that a queue looks as busy as it is; one that stands alone is drawn to be seen.
function paintLane(c, lane, { top, height }, labels = true) {
  c.fillStyle = colours.track;
  c.fillRect(view.left, top, view.width, height);
  const first = rank(lane.ends, view.start);
  const last = rank(lane.starts, view.end);
  c.font = SMALL;
  for (let at = first; at < last; ) {
    const sort = ops.sort[lane.occasions[at] % COUNT];
    const x = xOf(lane.starts[at]);
    let end = xOf(lane.ends[at]);
    let next = at + 1;
    while (
      next < last && end - x < 3 && ops.sort[lane.occasions[next] % COUNT] === sort &&
      xOf(lane.starts[next]) - end < 0.05
    ) {
      end = xOf(lane.ends[next]);
      next += 1;
    }
    const thin = end - x < 1;
    const alone = (at === first || x - xOf(lane.ends[at - 1]) > 4) && (next === last || xOf(lane.starts[next]) - end > 4);
    c.globalAlpha = (emphasis && emphasis !== SORTS[sort] ? 0.15 : 1) * (thin && !alone ? Math.max(0.03, end - x) : 1);
    c.fillStyle = colours[SORTS[sort]];
    c.fillRect(x, top + 1, thin ? 1 : end - x - (end - x > 4 ? 1 : 0), height - 2);
    if (labels && next === at + 1) paintLabel(c, lane.occasions[at] % COUNT, x, end, top + height / 2);
    at = next;
  }
  c.globalAlpha = 1;
}

function paintLabel(c, op, x, end, y) {
  const from = Math.max(x, view.left) + 5;
  const room = Math.min(end, view.left + view.width) - from - 4;
  if (room < 14) return;
  const fitting = barNames(op).find((each) => c.measureText(each).width <= room);
  if (!fitting) return;
  c.fillStyle = colours.inks[SORTS[ops.sort[op]]];
  c.textAlign = "left";
  c.fillText(fitting, from, y);
}

// Bytes at the top of the memory chart: the budget in sight, unless it is far above all that is used.
function ceiling() {
  const budget = doc.plan.gpu_budget_bytes;
  return (budget && budget < 1.8 * peakSample.total ? Math.max(budget, peakSample.total) : peakSample.total) * 1.1;
}

// The fullest sample of each column of pixels, equal neighbours together, as a stack of parts.
function paintMemory(c, { top, height }, from, to, plain = false) {
  const scale = height / ceiling();
  const perPixel = (to - from) / view.width;
  let number = Math.max(0, rank(sampleStarts, from) - 1);
  let run = null;
  const flush = (end) => {
    if (run) paintStack(c, samples[run.sample].parts, run.x, end - run.x, top + height, scale, plain);
  };
  for (let column = 0; column < view.width; column++) {
    const begin = from + column * perPixel;
    const end = begin + perPixel;
    while (number < samples.length - 1 && samples[number].end <= begin && samples[number + 1].start <= begin) number += 1;
    let fullest = number;
    for (let next = number + 1; next < samples.length && samples[next].start < end; next++) {
      if (samples[next].total > samples[fullest].total) fullest = next;
    }
    if (samples[number].start >= end || samples[fullest].end < begin) fullest = -1;
    if (run?.sample === fullest) continue;
    flush(view.left + column);
    run = fullest < 0 ? null : { sample: fullest, x: view.left + column };
  }
  flush(view.left + view.width);
  c.globalAlpha = 1;
}

function paintStack(c, parts, x, width, bottom, scale, plain) {
  let y = bottom;
  parts.forEach((part, number) => {
    if (!part) return;
    const name = PARTS[number];
    c.globalAlpha = plain ? 0.45 : emphasis && emphasis !== name ? 0.15 : 1;
    c.fillStyle = plain ? colours.quiet : colours[name];
    c.fillRect(x, y - part * scale, width, part * scale);
    y -= part * scale;
  });
}

function paintSteps(c) {
  for (let step = 1; step < doc.shown_steps; step++) {
    const x = xOf(step * doc.step_ns);
    c.fillStyle = colours.text;
    c.globalAlpha = 0.55;
    for (let y = AXIS - 4; y < heightOfAll; y += 6) c.fillRect(x - 0.5, y, 1, 3);
    c.globalAlpha = 1;
    if (recorded) {
      c.fillStyle = colours.text; // where the recorded one begins
      for (const [queue] of LANES) c.fillRect(xOf(step * doc.measured.step_ns) - 0.5, rows[queue].ran.top - 1, 1, RAN + 2);
    }
    const words = "next step →";
    c.font = SMALL;
    const room = view.left + view.width - x - 6;
    if (x < view.left + 84 || room < c.measureText(words).width) continue; // another word is there, or the end
    c.fillStyle = colours.quiet;
    c.textAlign = "left";
    c.fillText(words, x + 6, rows.memory.top - TITLE - 9);
  }
}

function paintNames(c) {
  c.textAlign = "right";
  c.font = view.left > 100 ? FONT : SMALL;
  c.fillStyle = colours.text;
  const short = { compute: "GPU", h2d: "to GPU", d2h: "to host", cpu: "CPU", disk_read: "disk", disk_write: "to disk" };
  for (const [queue] of LANES) {
    const name = view.left > 100 ? QUEUE_NAMES[queue] : short[queue];
    c.fillText(name, view.left - 10, rows[queue].top + rows[queue].height / 2);
    if (!recorded) continue;
    c.save();
    c.font = SMALL;
    c.fillStyle = colours.quiet;
    c.fillText(view.left > 100 ? "as it ran" : "ran", view.left - 10, rows[queue].ran.top + RAN / 2);
    c.restore();
  }
  c.textAlign = "left";
  c.fillText("GPU memory", view.left, rows.memory.top - TITLE - 9);
}

function paintLimits(c) {
  const { top, height } = rows.memory;
  const most = ceiling();
  const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10, 1].find((each) => most >= each);
  const step = tick(most / unit, 44, height) * unit;
  c.textAlign = "right";
  c.font = SMALL;
  for (let at = 0; at <= most; at += step) {
    const y = top + height - (at / most) * height;
    c.fillStyle = colours.line;
    c.fillRect(view.left - 4, y, 4, 1);
    c.fillStyle = colours.quiet;
    c.fillText(at ? `${Number((at / unit).toPrecision(3))} ${bytes(unit).slice(-3).trim()}` : "0", view.left - 10, y);
  }
  c.fillStyle = colours.line;
  c.fillRect(view.left, top + height, view.width, 1);
  const budget = doc.plan.gpu_budget_bytes;
  paintPeak(c, top + height, height / most, budget);
  if (!budget) return;
  const y = top + height - (budget / most) * height;
  const inside = budget <= most;
  const text = `budget ${bytes(budget)}${inside ? "" : ", far above"}`;
  c.fillStyle = colours.limit;
  c.font = FONT;
  c.textAlign = "right";
  c.fillText(text, view.left + view.width, (inside ? y : top) - 10);
  for (let x = view.left; inside && x < view.left + view.width; x += 9) c.fillRect(x, y - 0.75, 6, 1.5);
}

// Where the peak is, unless the budget's line says as much.
function paintPeak(c, bottom, scale, budget) {
  const y = bottom - peakSample.total * scale;
  const x = xOf((peakSample.start + peakSample.end) / 2);
  if (x < view.left || x > view.left + view.width || (budget - peakSample.total) * scale < 22) return;
  c.fillStyle = colours.text;
  c.font = SMALL;
  c.textAlign = x - view.left < 60 ? "left" : view.left + view.width - x < 60 ? "right" : "center";
  c.fillText(`peak ${bytes(peakSample.total)}`, x, y - 9);
}

// Both steps in small: who computes above, memory below, and a window around what the chart shows.
function paintStrip(width) {
  const height = 46;
  const c = context(strip, width, height);
  const x = (ns) => view.left + (ns / END) * view.width;
  c.fillStyle = colours.track;
  c.fillRect(view.left, 0, view.width, height);
  for (const phase of phases) {
    c.fillStyle = colours[phase.sort];
    c.globalAlpha = 0.75;
    c.fillRect(x(phase.start), 4, Math.max(1, x(phase.end) - x(phase.start) - 1), 8);
  }
  paintMemory(c, { top: 14, height: height - 15 }, 0, END, true);
  c.fillStyle = colours.panel;
  c.globalAlpha = 0.65;
  c.fillRect(view.left, 0, x(view.start) - view.left, height);
  c.fillRect(x(view.end), 0, view.left + view.width - x(view.end), height);
  c.globalAlpha = 1;
  c.strokeStyle = colours.accent;
  c.lineWidth = 2;
  c.strokeRect(x(view.start) + 1, 1, Math.max(3, x(view.end) - x(view.start) - 2), height - 2);
}
