// The piece of time that is shown, and how people change it.

const chartBox = document.getElementById("chart");
const view = { start: 0, end: END, left: 0, width: 1, changed: () => {} };
const SHORTEST = Math.max(100, END / 2e5);

const xOf = (ns) => view.left + ((ns - view.start) / (view.end - view.start)) * view.width;
const timeAt = (x) => view.start + ((x - view.left) / view.width) * (view.end - view.start);

function show(start, end) {
  const length = Math.min(END, Math.max(SHORTEST, end - start));
  view.start = Math.min(Math.max(0, start), END - length);
  view.end = view.start + length;
  view.changed();
}

function zoom(factor, at = (view.start + view.end) / 2) {
  show(at - (at - view.start) * factor, at + (view.end - at) * factor);
}

function pan(share) {
  const by = share * (view.end - view.start);
  show(view.start + by, view.end + by);
}

document.getElementById("in").onclick = () => zoom(0.5);
document.getElementById("out").onclick = () => zoom(2);
document.getElementById("whole").onclick = () => show(0, END);
document.getElementById("step").onclick = () => show(0, doc.step_ns);

const KEYS = {
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6),
  "-": () => zoom(1 / 0.6), 0: () => show(0, END), w: () => zoom(0.6), s: () => zoom(1 / 0.6), a: () => pan(-0.2),
  d: () => pan(0.2),
};
chartBox.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
  KEYS[event.key]();
  event.preventDefault();
});

const chartX = (event) => event.clientX - chartBox.getBoundingClientRect().left;

let hintTimer = 0;
chartBox.addEventListener(
  "wheel",
  (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (event.ctrlKey || event.metaKey) {
      zoom(Math.exp(Math.max(-80, Math.min(80, event.deltaY)) / 160), timeAt(chartX(event)));
    } else if (sideways) {
      pan((event.deltaX || event.deltaY) / view.width);
    } else {
      // The wheel alone scrolls the page, as everywhere; people who meant to zoom are told how.
      const hint = document.getElementById("hint");
      hint.textContent = `${navigator.platform.startsWith("Mac") ? "⌘" : "Ctrl"} + wheel zooms`;
      hint.hidden = false;
      clearTimeout(hintTimer);
      hintTimer = setTimeout(() => (hint.hidden = true), 900);
      return;
    }
    event.preventDefault();
  },
  { passive: false },
);
chartBox.addEventListener("dblclick", (event) => zoom(0.4, timeAt(chartX(event))));

// One pointer drags; two pinch: the times under the fingers stay under them.
const fingers = new Map();
chartBox.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  fingers.set(event.pointerId, timeAt(chartX(event)));
  chartBox.setPointerCapture(event.pointerId);
  chartBox.classList.add("dragged");
});
chartBox.addEventListener("pointermove", (event) => {
  if (!fingers.has(event.pointerId)) return;
  const held = fingers.get(event.pointerId);
  const others = [...fingers.entries()].filter(([pointer]) => pointer !== event.pointerId);
  if (!others.length) {
    const by = held - timeAt(chartX(event));
    show(view.start + by, view.end + by);
    return;
  }
  const [, anchor] = others[0];
  const place = xOf(anchor);
  const now = chartX(event);
  if (Math.abs(now - place) < 8 || Math.sign(now - place) !== Math.sign(held - anchor)) return;
  const perPixel = (held - anchor) / (now - place);
  const start = anchor - (place - view.left) * perPixel;
  show(start, start + perPixel * view.width);
});
for (const name of ["pointerup", "pointercancel"]) {
  chartBox.addEventListener(name, (event) => {
    fingers.delete(event.pointerId);
    if (!fingers.size) chartBox.classList.remove("dragged");
  });
}

// The strip: press to go there, drag to move along, drag an edge of the window to change its length.
const strip = document.getElementById("overview");
const stripTime = (event) => {
  const x = event.clientX - strip.getBoundingClientRect().left - view.left;
  return (Math.min(view.width, Math.max(0, x)) / view.width) * END;
};
const grip = { held: null, offset: 0 };
strip.addEventListener("pointerdown", (event) => {
  const at = stripTime(event);
  const near = (7 / view.width) * END;
  if (Math.abs(at - view.start) < near) grip.held = "start";
  else if (Math.abs(at - view.end) < near) grip.held = "end";
  else {
    grip.held = "middle";
    const inside = at > view.start && at < view.end;
    grip.offset = inside ? at - view.start : (view.end - view.start) / 2;
    show(at - grip.offset, at - grip.offset + view.end - view.start);
  }
  strip.setPointerCapture(event.pointerId);
});
strip.addEventListener("pointermove", (event) => {
  const at = stripTime(event);
  if (grip.held === "start") show(Math.min(at, view.end - SHORTEST), view.end);
  else if (grip.held === "end") show(view.start, Math.max(at, view.start + SHORTEST));
  else if (grip.held === "middle") show(at - grip.offset, at - grip.offset + view.end - view.start);
});
for (const name of ["pointerup", "pointercancel"]) strip.addEventListener(name, () => (grip.held = null));
