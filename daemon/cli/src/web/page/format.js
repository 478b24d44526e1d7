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

export function percent(part, whole) {
  return whole > 0 ? `${Math.floor((part / whole) * 100)}\u00a0%` : "–";
}

export function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
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
