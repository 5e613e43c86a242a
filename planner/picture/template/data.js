// The page's data, decoded once: operations as "occasions" (an operation in one of the steps) on lanes, memory samples.

const doc = JSON.parse(document.getElementById("data").textContent);
const ops = doc.operations;
const COUNT = ops.kind.length;
const STEPS = ops.start_ns.length;
const SORTS = ops.sorts;
const PARTS = doc.memory.parts;
const STAGES = doc.stages.map((text) => text.split(" ")[0]);

// An occasion is numbered step * COUNT + operation.
const startOf = (occasion) => ops.start_ns[Math.floor(occasion / COUNT)][occasion % COUNT];
const endOf = (occasion) => ops.end_ns[Math.floor(occasion / COUNT)][occasion % COUNT];

// What an occasion waited for; those before the first step shown are left out.
function waitsOf(occasion) {
  const op = occasion % COUNT;
  const step = occasion - op;
  return ops.waits[op].map((wait) => (wait < op ? step : step - COUNT) + wait).filter((found) => found >= 0);
}

let followers = null;
function waitedOnBy(occasion) {
  if (!followers) {
    followers = new Map();
    for (let each = 0; each < STEPS * COUNT; each++) {
      for (const source of waitsOf(each)) {
        if (!followers.has(source)) followers.set(source, []);
        followers.get(source).push(each);
      }
    }
  }
  return followers.get(occasion) ?? [];
}

// One lane per queue: the occasions that take time, in order, with the waits that made each late.
const lanes = ops.queues.map(() => ({ occasions: [], starts: [], ends: [], causes: [] }));
{
  const free = ops.queues.map(() => 0);
  const pending = ops.queues.map(() => []);
  for (let occasion = 0; occasion < STEPS * COUNT; occasion++) {
    const queue = ops.queue[occasion % COUNT];
    const start = startOf(occasion);
    const end = endOf(occasion);
    const late = start - free[queue];
    if (late > 0 && lanes[queue].occasions.length) {
      // What takes no time itself can hold its queue up, too: its reasons are those of the next that does.
      const last = waitsOf(occasion).reduce((a, b) => (a === null || endOf(b) > endOf(a) ? b : a), null);
      if (last !== null) pending[queue].push({ source: last, ns: late });
    }
    free[queue] = end;
    if (end > start) {
      const lane = lanes[queue];
      lane.occasions.push(occasion);
      lane.starts.push(start);
      lane.ends.push(end);
      lane.causes.push(pending[queue]);
      pending[queue] = [];
    }
  }
}

const samples = doc.memory.samples.map((row) => {
  const parts = row.slice(2);
  return { start: row[0], end: row[1], parts, total: parts.reduce((a, b) => a + b, 0) };
});
const sampleStarts = samples.map((sample) => sample.start);
const peakSample = samples.reduce((a, b) => (b.total > a.total ? b : a));

// A copy queue may be ahead of the computing that begins a step, and the CPU behind the one that ends it.
const START = Math.min(0, ...lanes.map((lane) => lane.starts[0] ?? 0));
const END = Math.max(STEPS * doc.step_ns, ...lanes.map((lane) => lane.ends.at(-1) ?? 0));

// Where `value` belongs in ascending `values`: the number of entries that are not larger.
function rank(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The phases of each step, for the ruler.
const phases = [];
for (let step = 0; step < STEPS; step++) {
  for (const [direction, name, sort] of [["F", "forward", "forward"], ["H", "head and loss", "head"], ["B", "backward", "backward"]]) {
    let start = Infinity;
    let end = -Infinity;
    for (let op = 0; op < COUNT; op++) {
      if (SORTS[ops.sort[op]] !== sort) continue;
      start = Math.min(start, ops.start_ns[step][op]);
      end = Math.max(end, ops.end_ns[step][op]);
    }
    if (end > start) phases.push({ direction, name, sort, start, end });
  }
}
