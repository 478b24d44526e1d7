// The first part of the page: the sentence, the bar, and the figures. All numbers are the daemon's.

import { bytes, division, percent, plural } from "./format.js";
import { made } from "./tables.js";

const find = (id) => document.getElementById(id);

const REST = [
  [["download", "staging"], "downloads and imports in progress"], [["trash"], "trash"], [["quarantine"], "quarantine"],
  [["unneeded"], "not needed"], [["in_use"], "removed, but in use"], [["reserve"], "reserve"],
];

export function showOverview(usage, models) {
  const { logical_bytes: files, stored_bytes: stored, saved_bytes: saved, model_count: count, rows } = usage;
  const [asFiles, inStore, less] = division(files, [stored]);
  const share = saved > 0 ? `${less} saved (${percent(saved, files)})` : "nothing saved yet";
  find("sentence").textContent = count > 0 ? `${plural(count, "model")}, ${asFiles} as files, ${inStore} stored, ${share}` : "";
  const shared = rows.filter((row) => row.kind === "shared").reduce((sum, row) => sum + row.bytes, 0);
  const [, sharedText, ownText] = division(stored, [shared]);
  showBar([
    ["model", `${ownText} of one model only`, stored - shared], ["shared", `${sharedText} of several models, stored once`, shared],
    ["saved", `${less} saved by sharing`, saved],
  ], count > 0);
  find("disk-sentence").textContent = diskSentence(usage);
  showFigures(usage, models);
}

/** The parts that are there; each has its size in the legend below. */
function showBar(parts, isShown) {
  find("bar-figure").hidden = !isShown;
  const there = parts.filter(([, , size]) => size > 0);
  const bar = find("bar");
  bar.replaceChildren(...there.map(([kind, title, size]) => {
    const segment = made("span", "", kind);
    segment.style.flexGrow = size;
    segment.title = title;
    return segment;
  }));
  bar.setAttribute("aria-label", there.map(([, title]) => title).join(", "));
  find("bar-legend").replaceChildren(...there.map(([kind, title]) => made("li", [made("span", "", kind), title])));
}

/** What the directory takes, part by part: the rounded numbers add up. */
function diskSentence({ disk_bytes: disk, stored_bytes: stored, rows }) {
  const of = (kinds) => rows.filter((row) => kinds.includes(row.kind)).reduce((sum, row) => sum + row.bytes, 0);
  const parts = [[stored, "models"], ...REST.map(([kinds, title]) => [of(kinds), title])].filter(([size]) => size > 0);
  const [all, ...sizes] = division(disk, parts.map(([size]) => size));
  const titles = [...parts.map(([, title]) => title), "records, index and others"];
  const texts = sizes.map((size, place) => `${size} ${titles[place]}`).filter((part) => !/^0(\.0+)? /.test(part));
  return `The store's directory takes ${all}: ${texts.join(", ")}.`;
}

function showFigures(usage, models) {
  const inLower = models.filter((model) => model.store).length;
  const figures = [
    ["Models", String(models.length - inLower > usage.model_count ? `${usage.model_count} with ${models.length - inLower} names` : models.length)],
    ...(inLower > 0 ? [["In lower stores", String(inLower)]] : []),
    ["On disk", bytes(usage.disk_bytes)],
    ...(usage.reclaimable_bytes > 0 ? [["Can be freed", bytes(usage.reclaimable_bytes)]] : []),
    ...(usage.quota_bytes ? [["Quota", `${bytes(usage.used_bytes)} of ${bytes(usage.quota_bytes)}`]] : []),
    ["Free on the disk", bytes(usage.free_bytes)],
  ];
  find("figures").replaceChildren(...figures.map(([title, value]) => made("div", [made("dt", title), made("dd", value)])));
}
