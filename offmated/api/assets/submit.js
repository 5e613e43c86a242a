// A job file that is dropped or chosen: shown with what the daemon says of it, and submitted by one click.

import * as api from "./api.js";
import { element, find } from "./dom.js";
import { errorWords, printable, until } from "./words.js";

const MOST = 2 ** 18; // characters (code points) of a job file; of a longer one the daemon says that it is too long
const FOLDER = "offmate-folder", HOVER_MS = 500;

let file = null; // {yaml, name}
let key = ""; // of this submission: sent twice, it is one job
let asked = 0; // answers to earlier questions are not shown
let hovering = 0;

const newKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
const body = () => ({ ...file, folder: find("#folder").value.trim() });
const unread = (name, why) => errorWords({
  what: `Cannot read the job file ${name}: ${why}.`, numbers: [], hint: "give a YAML file", code: "missing-file",
});

function say(text, { error = false, rows = [] } = {}) {
  const place = find("#answer");
  place.classList.toggle("refused", error);
  place.querySelector("p").textContent = printable(text);
  place.querySelector("dl").replaceChildren(...rows.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
}

const notes = (job) => job.notes.map((note) => ["note", note]);

async function check() {
  const mine = ++asked;
  find("#submit").disabled = true;
  key = newKey();
  localStorage.setItem(FOLDER, find("#folder").value);
  say("Checking the job and its first records …");
  try {
    const job = await api.check(body());
    if (mine !== asked) return;
    say(`It can be submitted, as ${job.name}.`, { rows: notes(job) });
    find("#submit").disabled = false;
  } catch (error) {
    if (mine === asked) say(error instanceof api.Refused ? error.message : "The daemon does not answer.", { error: true });
  }
}

async function submit(done) {
  const mine = ++asked;
  find("#submit").disabled = true;
  say("Submitting …");
  try {
    const job = await api.submit(body(), key);
    find("#hand").classList.add("taken");
    find("#away").focus();
    say(`Job ${job.id} (${job.name}) is submitted, place ${job.place} in the queue.`, { rows: [
      ["run folder", job.run_dir], ["window", job.window], ["expected", until(job)], ...notes(job),
    ].filter(([, value]) => value) });
    done(job.id);
  } catch (error) {
    if (mine !== asked) return;
    say(error instanceof api.Refused ? error.message : "The daemon does not answer.", { error: true });
    find("#submit").disabled = false; // under the same key
  }
}

// One character more than a job file may have is enough: the daemon then refuses the file as it refuses the whole one.
// It counts characters as code points, and not as the UTF-16 units of a string's length.
async function readFile(files) {
  const [given] = files, name = given.name;
  if (files.length > 1) throw new Error(`These are ${files.length} files. Drop one at a time.`);
  const part = await given.slice(0, 4 * MOST + 4).arrayBuffer().catch(() => { throw new Error(unread(name, "it is no file")); });
  const whole = part.byteLength === given.size;
  let yaml;
  try {
    yaml = new TextDecoder("utf-8", { fatal: true }).decode(part, { stream: !whole });
  } catch {
    throw new Error(unread(name, "it is not UTF-8 text"));
  }
  return { yaml: Array.from(yaml).slice(0, MOST + 1).join(""), name };
}

async function take(files) {
  if (files.length === 0) return;
  const mine = ++asked;
  find("#hand").hidden = false;
  find("#hand").classList.remove("taken");
  find("#hand h2").textContent = printable(files[0].name);
  say("Reading the file …"); // in place of what was said of the file before
  find("#submit").disabled = true;
  file = null;
  let read = null, trouble = "";
  try {
    read = await readFile(files);
  } catch (error) {
    trouble = error.message;
  }
  if (mine !== asked) return; // a later file was given meanwhile, or this one was put away
  file = read;
  if (trouble) say(trouble, { error: true });
  find("#hand details").hidden = file === null;
  find("#hand pre").textContent = file === null ? "" : printable(file.yaml);
  find("#hand").scrollIntoView({ block: "nearest" });
  find("#hand h2").focus({ preventScroll: true });
  if (file !== null) await check();
}

export function takeFiles(done) {
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  find("#folder").value = localStorage.getItem(FOLDER) ?? "~";
  find("#folder").onchange = () => { if (file !== null) check(); };
  find("#submit").onclick = () => submit(done);
  find("#away").onclick = () => { asked += 1; file = null; find("#hand").hidden = true; find("#choose").focus(); };
  find("#choose").onclick = () => find("#file").click();
  find("#file").onchange = ({ target }) => { take([...target.files]); target.value = ""; };
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
    clearTimeout(hovering);
    hovering = setTimeout(() => document.body.classList.remove("dropping"), HOVER_MS);
  });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault(); // or the browser would leave the page, and open the file
    document.body.classList.remove("dropping");
    take([...event.dataTransfer.files]);
  });
}
