// Another place in the queue for a job that waits: by its two buttons, or by dragging its row.

import * as api from "./api.js";
import { ask, find, sign } from "./dom.js";
import { printable } from "./words.js";

let dragged = null; // a job's number

export const isDragging = () => dragged !== null;

// What `offmate move` prints.
const moved = (job, why) => `Job ${job.id} is ${job.standing}, place ${job.place}: ${why}.`;

// Adds to the queue's rows what moves their jobs. `whole`: the page has the queue to its end.
export function addPlaces(rows, jobs, whole, named, reason, done) {
  const waiting = jobs.filter((job) => job.state !== "running");
  const before = (at) => (at < waiting.length ? { before: waiting[at].id } : whole ? { to: "last" } : null);
  async function move(id, where) {
    try {
      const job = await api.move(id, where);
      await done();
      find("#moved").textContent = printable(moved(job, reason(job)));
    } catch (error) {
      await ask("It was not moved", error.message, "OK");
      await done();
    }
  }
  rows.forEach((row, number) => {
    const job = jobs[number], at = waiting.indexOf(job);
    if (at >= 0) {
      const up = at > 0 ? before(at - 1) : null, down = at + 1 < waiting.length ? before(at + 2) : null;
      row.cells[0].prepend(
        sign("up", `Move ${named(job)} up`, `up-${job.id}`, up && (() => move(job.id, up))),
        sign("down", `Move ${named(job)} down`, `down-${job.id}`, down && (() => move(job.id, down))),
      );
      row.draggable = true;
      row.ondragstart = (event) => {
        dragged = job.id;
        event.dataTransfer.effectAllowed = "move";
        event.dataTransfer.setData("text/plain", String(job.id));
      };
      row.ondragend = () => { dragged = null; done(); };
    }
    // Above the middle of a row is the place before its job, below it the place after it.
    const target = (event) => {
      const { top, height } = row.getBoundingClientRect(), after = at < 0 || event.clientY > top + height / 2;
      const ahead = jobs.slice(0, number + after).filter((one) => one.state !== "running").length;
      const own = waiting.findIndex((one) => one.id === dragged);
      return { after, where: ahead === own || ahead === own + 1 ? null : before(ahead) };
    };
    row.ondragover = (event) => {
      const { after, where } = target(event);
      if (!isDragging() || !where) return;
      event.preventDefault();
      row.classList.toggle("below", after);
      row.classList.toggle("above", !after);
    };
    row.ondragleave = () => row.classList.remove("below", "above");
    row.ondrop = (event) => {
      const { where } = target(event), id = dragged;
      if (!isDragging() || !where) return;
      event.preventDefault();
      dragged = null;
      move(id, where);
    };
  });
}
