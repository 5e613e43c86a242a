// A job's keys: those that are not the defaults, all of them, and those in which jobs differ.

import * as api from "./api.js";
import { element, find } from "./dom.js";
import { budget } from "./words.js";

const read = new Map(); // job -> {of, keys}: asked again when the job has been planned or tried again

function words(name, value) {
  if (typeof value === "string") return value;
  if (name.endsWith("_budget") && value) return budget(value);
  if (Array.isArray(value) && value.length > 0 && value.every((one) => typeof one === "string")) return value.join("\n");
  return value === undefined ? "–" : JSON.stringify(value);
}

export async function keysOf(job) {
  const of = `${job.state} ${job.attempts}`;
  try {
    if (read.get(job.id)?.of !== of) read.set(job.id, { of, keys: await api.keys(job.id) });
  } catch (error) {
    if (!(error instanceof api.Refused)) throw error;
    return { keys: {}, changed: [], trouble: error.message }; // its file is damaged: all else is shown
  }
  return read.get(job.id).keys;
}

function list(place, names, keys) {
  place.replaceChildren(...names.map((name) => {
    const made = element("div");
    made.append(element("dt", name), element("dd", words(name, keys[name])));
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
  const same = (name) => new Set(all.map(({ keys }) => JSON.stringify(keys[name]))).size === 1;
  return names.filter((name) => !same(name)).map((name) => [name, ...all.map(({ keys }) => words(name, keys[name]))]);
}
