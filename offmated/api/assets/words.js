// Numbers and foreign text as people read them.

// As in terminals: what would steer the reading direction, and what nobody sees, is seen.
export const printable = (text) => String(text).replace(/[^\P{C}\n\t]|[\u2028\u2029]/gu, "\ufffd");

// An error as commands print it.
export function errorWords({ what, numbers = [], hint, code }) {
  return [what, ...numbers.map((number) => `  ${number}`), `  ${hint ? `hint: ${hint}   ` : ""}[${code}]`].join("\n");
}

const two = (count) => String(count).padStart(2, "0");

// Durations, times and sizes as commands say them.
export function duration(seconds) {
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
}

const DAYS = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"], DAY_S = 86400;

// By the clock of whoever looks, to the minute that it is not after: "06:40" within a day, "Tue 06:40" within a week.
export function moment(seconds) {
  const minute = Math.ceil(seconds / 60) * 60, then = new Date(minute * 1000), away = Math.abs(minute - Date.now() / 1000);
  const clock = `${two(then.getHours())}:${two(then.getMinutes())}`;
  if (away < DAY_S) return clock;
  if (away < 6 * DAY_S) return `${DAYS[then.getDay()]} ${clock}`;
  return `${then.getFullYear()}-${two(then.getMonth() + 1)}-${two(then.getDate())} ${clock}`;
}

// When a job is done, or begins; "" where nobody can know.
export function until(job) {
  const { starts_at: start, ends_at: end, nights } = job.expected;
  if (end != null) return `done by ${moment(end)}${nights > 1 ? `, ${nights} nights` : ""}`;
  if (nights) return "done after many nights";
  return start != null && job.state !== "running" ? `begins ${moment(start)}` : "";
}

// Sizes: one decimal; what is used is rounded up, what there is is rounded down.
function sized(count, round) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0, factor = 1;
  while (count >= 1024 * factor && at < units.length - 1) { factor *= 1024; at += 1; }
  return at === 0 ? `${count} B` : `${(round(count * 10 / factor) / 10).toFixed(1)} ${units[at]}`;
}

export const bytes = (count) => sized(count, Math.ceil);
export const budget = (count) => sized(count, Math.floor);

export const number = (value) => Number(value.toPrecision(4)).toString();
