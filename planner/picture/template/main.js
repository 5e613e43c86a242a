// Puts it together: one drawing per frame, however many events there were.

let asked = false;
let stale = true;

function soon() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    if (stale) paint();
    stale = false;
    paintOver();
  });
}

view.changed = () => {
  stale = true;
  soon();
};

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  view.changed();
});
new ResizeObserver(view.changed).observe(chartBox);
readColours();
view.changed();
