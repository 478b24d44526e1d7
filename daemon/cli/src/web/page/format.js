// Texts for numbers and times.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** A size in binary units with three digits, as the commands print it. */
export function bytes(count) {
  let value = Number(count);
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  if (unit === 0) return `${value} B`;
  const digits = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

/** A whole, parts of it and the rest in the unit of the whole, so that the rounded numbers add up, as the commands print them. */
export function division(whole, parts) {
  const rest = Math.max(parts.reduce((left, part) => left - part, whole), 0);
  let unit = 0;
  while (unit < UNITS.length - 1 && whole >= 1024 ** (unit + 1)) unit += 1;
  if (unit === 0 || parts.some((part) => part > whole)) return [whole, ...parts, rest].map(bytes);
  const scale = whole < 10 * 1024 ** unit ? 100 : 10;
  const [all, ...some] = [whole, ...parts].map((part) => Math.round((part * scale) / 1024 ** unit));
  const left = Math.max(some.reduce((sum, part) => sum - part, all), 0);
  return [all, ...some, left].map((number) => `${(number / scale).toFixed(scale === 100 ? 2 : 1)} ${UNITS[unit]}`);
}

/** `7.2 B`: a number of parameters. */
export function count(number) {
  const unit = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "K"]].find(([least]) => number >= least);
  if (!unit) return String(number);
  const value = number / unit[0];
  return `${value >= 99.5 ? value.toFixed(0) : value.toFixed(1)} ${unit[1]}`;
}

/** `3 min`: how long something takes. */
export function duration(seconds) {
  if (seconds < 90) return `${Math.max(Math.ceil(seconds), 1)} s`;
  if (seconds < 90 * 60) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds / 3600)} h`;
}

const SPANS = [[365 * 86400, "year"], [30 * 86400, "month"], [86400, "day"], [3600, "hour"], [60, "minute"]];

/** `3 days ago`, `in 2 hours` */
export function relative(time, now = Date.now()) {
  if (!time) return "–";
  const seconds = (now - Date.parse(time)) / 1000;
  const span = SPANS.find(([length]) => Math.abs(seconds) >= length);
  if (!span) return seconds >= 0 ? "just now" : "now";
  const count = Math.floor(Math.abs(seconds) / span[0]);
  const text = `${count} ${span[1]}${count === 1 ? "" : "s"}`;
  return seconds >= 0 ? `${text} ago` : `in ${text}`;
}

/** `4 December, 15:50`: a moment in the time zone of the browser. */
export function day(time) {
  return new Date(time).toLocaleString("en-GB", { day: "numeric", month: "long", hour: "2-digit", minute: "2-digit" });
}

/** The short form of a digest, as the commands print it. */
export function id(digest) {
  return digest.replace("sha256:", "").slice(0, 12);
}

export function percent(part, whole) {
  return whole > 0 ? `${Math.floor((part / whole) * 100)}\u00a0%` : "–";
}

/** `3 files`; `plurals` is its plural if that is irregular. */
export function plural(count, noun, plurals = `${noun}s`) {
  return `${count} ${count === 1 ? noun : plurals}`;
}

/** The first names of a list, and the number of all others. */
export function names(list, most, total = list.length) {
  const shown = list.slice(0, most);
  const rest = total - shown.length;
  return shown.join(", ") + (rest > 0 ? ` and ${rest} more` : "");
}

export function user(id) {
  return id.user ?? `uid ${id.uid}`;
}
