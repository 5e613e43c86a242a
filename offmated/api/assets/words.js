// Numbers and foreign text as people read them.

// As in terminals: what would steer the reading direction, and what nobody sees, is seen.
export const printable = (text) => String(text).replace(/[^\P{C}\n\t]|[\u2028\u2029]/gu, "\ufffd");

export function duration(seconds) {
  if (seconds < 60) return `${seconds < 9.95 ? seconds.toPrecision(2) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.round(hours / 24)} days`;
}

// As commands say them: one decimal; what is used is rounded up, what there is is rounded down.
function sized(count, round) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0, factor = 1;
  while (count >= 1024 * factor && at < units.length - 1) { factor *= 1024; at += 1; }
  return at === 0 ? `${count} B` : `${(round(count * 10 / factor) / 10).toFixed(1)} ${units[at]}`;
}

export const bytes = (count) => sized(count, Math.ceil);
export const budget = (count) => sized(count, Math.floor);

export const number = (value) => Number(value.toPrecision(4)).toString();

export function moment(seconds) {
  const then = new Date(seconds * 1000), today = new Date();
  const clock = then.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  if (then.toDateString() === today.toDateString()) return clock;
  return `${then.toLocaleDateString([], { weekday: "short", day: "numeric", month: "short" })}, ${clock}`;
}
