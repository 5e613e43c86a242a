// What the page asks of the daemon. The token came behind the address's "#", which browsers send to nobody.

import { errorWords } from "./words.js";

const KEY = "offmate-token";

export class Refused extends Error {}

export function takeToken() {
  const given = location.hash.slice(1);
  if (given && !given.startsWith("job-")) {
    localStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname);
  }
}

async function send(method, path, body, more = {}) {
  const headers = { Authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}`, ...more };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.ok) return answer;
  const error = await answer.json().catch(() => null);
  throw new Refused(error?.what ? errorWords(error) : `${answer.status} ${answer.statusText}`);
}

const json = async (path) => (await send("GET", path)).json();

export const health = () => json("/health");
export const queue = () => json("/queue?limit=50");
export const finished = () => json("/jobs?limit=20&order=ended&state=done&state=failed&state=cancelled");
export const job = (id) => json(`/jobs/${id}`);
export const events = (id, position) => json(`/jobs/${id}/events?position=${position}`);
export const log = async (id) => (await send("GET", `/jobs/${id}/logs?tail=65536`)).text();
export const planLink = async (id) => (await (await send("POST", `/ticket?path=/jobs/${id}/plan.html`)).json()).url;
export const cancel = (id) => send("POST", `/jobs/${id}/cancel`);
export const change = (what) => (id) => send("POST", `/jobs/${id}/${what}`);
export const retry = (id) => send("POST", `/jobs/${id}/retry`, {});
export const keys = (id) => json(`/jobs/${id}/keys`);
export const check = async (file) => (await send("POST", "/jobs/check", file)).json();
export const submit = async (file, key) => (await send("POST", "/jobs", file, { "Idempotency-Key": key })).json();
export const move = async (id, where) => (await send("POST", `/jobs/${id}/move`, where)).json();
