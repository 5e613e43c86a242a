// A job's keys: those that are not the defaults, all of them, and those in which jobs differ.

import * as api from "./api.js";
import { element, find } from "./dom.js";

const read = new Map(); // job -> {of, keys}: asked again when the job has been planned or tried again

function words(value) {
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.length > 0 && value.every((one) => typeof one === "string")) return value.join("\n");
  return value === undefined ? "–" : JSON.stringify(value);
}

export async function keysOf(job) {
  const of = `${job.state} ${job.attempts}`;
  if (read.get(job.id)?.of !== of) {
    const keys = await api.keys(job.id).catch((error) => {
      if (!(error instanceof api.Refused)) throw error;
      return { keys: {}, changed: [], trouble: error.message }; // its file is damaged: all else is shown
    });
    read.set(job.id, { of, keys });
  }
  return read.get(job.id).keys;
}

function list(place, names, keys) {
  place.replaceChildren(...names.map((name) => {
    const made = element("div");
    made.append(element("dt", name), element("dd", words(keys[name])));
    return made;
  }));
}

export function showKeys({ keys, changed, trouble }) {
  const place = find("#keys");
  if (place.shown === keys) return; // who reads or copies there is not disturbed
  place.shown = keys;
  place.querySelector("p").hidden = !trouble;
  place.querySelector("p").textContent = trouble ?? "";
  list(place.querySelector("dl"), changed, keys);
  list(place.querySelector("details dl"), Object.keys(keys), keys);
}

// The rows of a table: each key that has not the same value in all jobs.
export function differing(all) {
  const names = [...new Set(all.flatMap(({ keys }) => Object.keys(keys)))];
  return names.map((name) => [name, ...all.map(({ keys }) => words(keys[name]))])
    .filter(([, first, ...others]) => others.some((other) => other !== first));
}
