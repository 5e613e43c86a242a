// The page's data, decoded once: operations as "occasions" (an operation in one of the steps) on lanes, memory samples.

const doc = JSON.parse(document.getElementById("data").textContent);
const ops = doc.operations;
const COUNT = ops.kind.length;
const STEPS = ops.start_ns.length;
const FIRST = doc.first_step; // the steps around those that are shown are there for what runs meanwhile
const PLANNED_END = doc.planned_end_ns;
const END = doc.end_ns; // of what was recorded, if that took longer
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
  const free = ops.queues.map(() => Infinity);
  const pending = ops.queues.map(() => []);
  for (let occasion = 0; occasion < STEPS * COUNT; occasion++) {
    const queue = ops.queue[occasion % COUNT];
    const start = startOf(occasion);
    const end = endOf(occasion);
    const late = start - free[queue];
    if (late > 0) {
      // What takes no time itself can hold its queue up, too: its reasons are those of the next that does.
      const last = waitsOf(occasion).reduce((a, b) => (a === null || endOf(b) > endOf(a) ? b : a), null);
      if (last !== null) pending[queue].push({ source: last, ns: late });
    }
    free[queue] = end;
    if (end > start) {
      if (end > 0 && start < PLANNED_END) {
        const lane = lanes[queue];
        lane.occasions.push(occasion);
        lane.starts.push(start);
        lane.ends.push(end);
        lane.causes.push(pending[queue]);
      }
      pending[queue] = [];
    }
  }
}

// What was recorded of a run, likewise; allocations and releases are left out, which the plan takes for nothing.
const recorded = doc.measured && ops.queues.map(() => ({ occasions: [], starts: [], ends: [] }));
if (recorded) {
  const found = ops.queues.map(() => []);
  doc.measured.start_ns.forEach((starts, step) => {
    starts.forEach((start, op) => {
      const end = doc.measured.end_ns[step][op];
      if (end > start && end > 0 && start < END && SORTS[ops.sort[op]] !== "memory") {
        found[ops.queue[op]].push([start, end, (FIRST + step) * COUNT + op]);
      }
    });
  });
  found.forEach((bars, queue) => {
    for (const [start, end, occasion] of bars.sort((a, b) => a[0] - b[0])) {
      recorded[queue].occasions.push(occasion);
      recorded[queue].starts.push(start);
      recorded[queue].ends.push(end);
    }
  });
}

const samples = doc.memory.samples.map((row) => {
  const parts = row.slice(2);
  return { start: row[0], end: row[1], parts, total: parts.reduce((a, b) => a + b, 0) };
});
const sampleStarts = samples.map((sample) => sample.start);
const peakSample = samples.reduce((a, b) => (b.total > a.total ? b : a));

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

// The phases of each step, for the ruler: in every round the model goes forward and back.
const phases = [];
for (let step = FIRST; step < FIRST + doc.shown_steps; step++) {
  const found = new Map();
  for (let op = 0; op < COUNT; op++) {
    const sort = SORTS[ops.sort[op]];
    const [direction, name] = { forward: ["F", "forward"], head: ["H", "head and loss"], backward: ["B", "backward"] }[sort] ?? [];
    if (!name || ops.end_ns[step][op] === ops.start_ns[step][op]) continue;
    const key = `${sort} ${ops.round[op]}`;
    if (!found.has(key)) found.set(key, { direction, name, sort, start: Infinity, end: -Infinity });
    const phase = found.get(key);
    phase.start = Math.min(phase.start, ops.start_ns[step][op]);
    phase.end = Math.max(phase.end, ops.end_ns[step][op]);
  }
  phases.push(...found.values());
}
