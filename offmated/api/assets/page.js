// The page: asks every two seconds, shows what it hears. All text of jobs goes in as text, never as markup.

import * as api from "./api.js";
import { Chart, Curves } from "./charts.js";
import { box, chooseNone, showComparison } from "./compare.js";
import { ask, element, fill, find } from "./dom.js";
import { keysOf, showKeys } from "./keys.js";
import { addPlaces, isDragging } from "./places.js";
import { takeFiles } from "./submit.js";
import { budget, bytes, duration, errorWords, moment, number, printable, until } from "./words.js";

const EVERY_MS = 2000, UNSEEN_MS = 30000;
const OVER = new Set(["done", "failed", "cancelled"]);

const learned = [{ label: "training", colour: "loss" }, { label: "evaluation", colour: "eval", dots: true }];
const charts = {
  loss: new Chart(find("#loss"), learned),
  margins: new Chart(find("#margins"), learned),
  pace: new Chart(find("#pace"), [{ label: "measured", colour: "measured" }, { label: "predicted", colour: "predicted" }]),
};
const read = new Map(); // job -> {curves, position}: what its events said so far
let chosen = null; // by a person; else the job that runs, or the last one
let shown = null; // the job that is on the page
let timer = 0;
let looks = 0; // an answer that comes after a later one is not shown

// Where a job stands, and why: as `offmate status` says it.
const reason = (job) => (job.reason.startsWith(`${job.standing}: `) ? job.reason.slice(job.standing.length + 2) : job.reason);
const kind = (job) => job.standing.replaceAll(" ", "-");
const title = (job) => `${job.id} · ${job.name}`;

function share(job) {
  const progress = job.progress;
  return progress && progress.total_steps ? progress.step / progress.total_steps : 0;
}

function howFar(job) {
  const progress = job.progress, words = [reason(job), until(job)];
  if (progress) {
    const left = progress.eta_s == null || job.state !== "running" ? "" : `, ${duration(progress.eta_s)} left`;
    words.unshift(`step ${progress.step} of ${progress.total_steps}${left}`);
  }
  return words.filter(Boolean).join("; ");
}

function row(job, cells) {
  const made = element("tr");
  made.classList.toggle("chosen", job.id === chosen);
  for (const [content, kind] of cells) {
    const cell = element("td", typeof content === "string" ? content : "", kind);
    if (typeof content !== "string") cell.append(content);
    made.append(cell);
  }
  return made;
}

function link(job) {
  const made = element("button", title(job)), cell = document.createDocumentFragment();
  made.type = "button";
  made.onclick = () => { choose(job.id); };
  made.dataset.at = `job-${job.id}`;
  cell.append(box(job, title(job), again), made, ...tags(job));
  return cell;
}

// A job's label, and what --set gave above its file.
function tags(job) {
  return [...(job.label ? [[job.label, "tag label"]] : []), ...job.settings.map((setting) => [setting, "tag"])]
    .map(([text, kind]) => element("span", text, kind));
}

function showQueue(page) {
  find("#idle").hidden = page.jobs.length > 0;
  find("#queue").hidden = page.jobs.length === 0;
  const more = page.total - page.jobs.length, rows = page.jobs.map((job) => row(job, [
    [String(job.place), "number"], [link(job), ""], [job.standing, `word ${kind(job)}`], [howFar(job), ""],
  ]));
  addPlaces(rows, page.jobs, more <= 0, title, reason, again);
  fill(find("#queue tbody"), rows);
  find("#more").hidden = more <= 0;
  find("#more").textContent = `and ${more} more`;
}

function showFinished(page) {
  find("#finished").hidden = page.jobs.length === 0;
  fill(find("#done tbody"), page.jobs.map((job) => {
    const took = job.started_at && job.ended_at ? duration(Math.max(0, job.ended_at - job.started_at)) : "";
    const evaluated = job.progress?.eval_loss, loss = evaluated ?? job.progress?.loss;
    return row(job, [
      [job.ended_at ? moment(job.ended_at) : "", "word"], [link(job), ""], [job.state, `word ${job.state}`],
      [loss == null ? "" : `${number(loss)} ${evaluated == null ? "train" : "eval"}`, `number${Number.isFinite(loss ?? 0) ? "" : " bad"}`], [took, "number"], [job.output ?? job.reason ?? "", ""],
    ]);
  }));
}

function card(name, value, remark, part) {
  const made = element("div", "", "card");
  made.append(element("span", name, "name"), element("span", value, "value"), element("span", remark, "remark"));
  if (part != null) {
    const meter = element("div", "", "meter"), bar = element("i", "", part > 1 ? "over" : "");
    bar.style.width = `${Math.min(1, part) * 100}%`;
    meter.append(bar);
    made.append(meter);
  }
  return made;
}

function cards(job, curves) {
  const { progress, plan, predicted, measured } = job, found = [];
  if (progress?.loss != null) {
    const evaluation = progress.eval_loss == null ? "" : `evaluation ${number(progress.eval_loss)}`;
    found.push(card("Loss", number(progress.loss), evaluation));
  }
  if (progress?.rewards_margins != null) {
    const accuracy = progress.rewards_accuracies, evaluation = progress.eval_rewards_margins;
    const words = [accuracy == null ? "" : `accuracy ${number(accuracy)}`, evaluation == null ? "" : `evaluation ${number(evaluation)}`];
    found.push(card("Margin of rewards", number(progress.rewards_margins), words.filter(Boolean).join(", ")));
  }
  const stepS = measured?.step_s ?? progress?.step_s;
  if (stepS != null || predicted?.step_s != null) {
    const remark = predicted?.step_s == null ? "" : `predicted ${duration(predicted.step_s)}`;
    found.push(card("A step", stepS == null ? "–" : duration(stepS), remark));
  }
  const last = [...curves.steps.values()].slice(-20);
  const seconds = last.reduce((sum, step) => sum + step.step_s, 0);
  if (seconds > 0) {
    const tokens = last.reduce((sum, step) => sum + (step.tokens ?? 0), 0);
    found.push(card("Tokens a second", Math.round(tokens / seconds).toLocaleString(), "mean of the last steps"));
  }
  if (plan) {
    const peak = measured?.gpu_peak_bytes ?? predicted?.gpu_peak_bytes ?? plan.gpu_peak_bytes;
    const seen = measured?.gpu_peak_bytes != null, given = `budget ${budget(plan.gpu_budget_bytes)}`;
    const words = seen ? `planned ${bytes(plan.gpu_peak_bytes)}, ${given}` : given;
    const name = seen ? "GPU memory, peak" : "GPU memory, planned";
    found.push(card(name, bytes(peak), words, peak / plan.gpu_budget_bytes));
    found.push(card("Host memory, planned", bytes(plan.cpu_peak_bytes), `budget ${budget(plan.cpu_budget_bytes)}`,
      plan.cpu_peak_bytes / plan.cpu_budget_bytes));
  }
  return found;
}

function showJob(job, curves, keys) {
  shown = job.id;
  find("#job").hidden = false;
  find("#title").textContent = printable(title(job));
  find("#tags").replaceChildren(...tags(job));
  const why = reason(job), chip = element("span", job.standing, kind(job));
  find("#state").replaceChildren(chip, document.createTextNode(why ? `: ${printable(why)}` : ""));
  find("#error").hidden = !job.error;
  find("#error").textContent = job.error ? printable(errorWords(job.error)) : "";
  find("#progress").hidden = !job.progress;
  if (job.progress) {
    find("#progress i").style.width = `${share(job) * 100}%`;
    find("#progress p").textContent = howFar({ ...job, reason: "" });
  }
  find("#cards").replaceChildren(...cards(job, curves));
  charts.loss.show(curves.of("loss"));
  const learnsFromPairs = curves.has("rewards_margins"); // a job with preferences
  find("#margins").hidden = !learnsFromPairs;
  if (learnsFromPairs) charts.margins.show(curves.of("rewards_margins"));
  charts.pace.show(curves.pace());
  showKeys(keys);
  find("#plan").hidden = !job.plan;
  find("#pause").hidden = OVER.has(job.state) || ["held", "paused"].includes(job.hold);
  find("#resume").hidden = OVER.has(job.state) || !job.hold;
  find("#cancel").hidden = OVER.has(job.state);
  find("#retry").hidden = !["failed", "cancelled"].includes(job.state);
  find("#samples").hidden = curves.samples.length === 0;
  find("#samples dl").replaceChildren(...curves.samples.flatMap((s) => [element("dt", s.prompt), element("dd", s.text)]));
  document.title = job.progress && !OVER.has(job.state) ? `${Math.floor(share(job) * 100)}% · offmate` : "offmate";
}

async function readEvents(id) {
  const known = read.get(id) ?? { curves: new Curves(), position: 0 };
  read.set(id, known);
  for (;;) {
    const answer = await api.events(id, known.position);
    known.curves.take(answer.events);
    if (answer.position === known.position) return known.curves;
    known.position = answer.position;
  }
}

async function showLog(id, isLatest) {
  if (!find("#log").open) return;
  const text = printable(await api.log(id));
  if (!isLatest()) return;
  const place = find("#log pre"), end = place.scrollTop + place.clientHeight >= place.scrollHeight - 4;
  place.textContent = text;
  if (end) place.scrollTop = place.scrollHeight;
}

async function look() {
  if (isDragging()) return; // a row that is drawn anew would fall from the pointer
  const mine = ++looks, isLatest = () => mine === looks;
  const [health, queue, finished] = await Promise.all([api.health(), api.queue(), api.finished()]);
  const doing = health.state === "running" ? "runs" : "ends: jobs save";
  find("#health").textContent = printable(`The daemon ${doing} (${health.version}); state in ${health.state_folder}`);
  if (isDragging() || !isLatest()) return;
  find("main").hidden = false;
  showQueue(queue);
  showFinished(finished);
  await showComparison(readEvents, isLatest);
  if (!isLatest()) return; // meanwhile a person chose another job, or a later look began
  const running = queue.jobs.find((job) => job.state === "running") ?? queue.jobs[0] ?? finished.jobs[0];
  const id = chosen ?? running?.id;
  if (id == null) { find("#job").hidden = true; return; }
  const [job, curves] = await Promise.all([api.job(id), readEvents(id)]);
  const keys = await keysOf(job);
  if (!isLatest()) return;
  showJob(job, curves, keys);
  await showLog(id, isLatest);
}

async function again() {
  clearTimeout(timer);
  try {
    await look();
    find("#trouble").hidden = true;
  } catch (error) {
    find("#trouble").hidden = false;
    find("#trouble").textContent = error instanceof api.Refused ? printable(error.message)
      : "The daemon does not answer; this page asks on. In a terminal: offmate up, then offmate page";
  }
  timer = setTimeout(again, document.hidden ? UNSEEN_MS : EVERY_MS);
}

function choose(id) {
  chosen = id;
  history.replaceState(null, "", `#job-${id}`);
  again().then(() => find("#job").scrollIntoView({ block: "nearest" }));
}

async function act(heading, text, word, doing) {
  const id = shown;
  if (!(await ask(`${heading} job ${id}?`, text, word))) return;
  try {
    await doing(id);
  } catch (error) {
    await ask("It was not done", error.message, "OK");
  }
  await again();
}

async function openPlan() {
  const tab = window.open("", "_blank"); // now, as an answer comes too late for a browser to see a person's wish in it
  if (!tab) return;
  tab.opener = null;
  try {
    tab.location = await api.planLink(shown);
  } catch (error) {
    tab.close();
    await ask("It cannot be shown", error.message, "OK");
  }
}

find("#none").onclick = () => { chooseNone(); again(); };
find("#plan").onclick = openPlan;
find("#pause").onclick = () => act("Pause", "It saves a checkpoint, leaves the GPU and waits until it is resumed.", "Pause it",
  api.change("pause"));
find("#resume").onclick = () => act("Resume", "It has its turn again, and goes on from its checkpoint.", "Resume it",
  api.change("resume"));
find("#cancel").onclick = () => act("Cancel", "It ends without a new checkpoint; those it has stay, and Retry goes on from the last.",
  "Cancel it", api.cancel);
find("#retry").onclick = () => act("Retry", "It goes on from its last checkpoint, or from the start where it has none.", "Retry it", api.retry);
find("#log").ontoggle = () => { again(); };
document.addEventListener("visibilitychange", () => { if (!document.hidden) again(); });

takeFiles(choose);
addEventListener("hashchange", () => { api.takeToken(); again(); });
api.takeToken();
const named = location.hash.match(/^#job-(\d+)$/);
if (named) chosen = Number(named[1]);
again();
