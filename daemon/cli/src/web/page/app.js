// Asks again and again what the store contains and who uses it, and shows it.

import { Lost, Refused, ask, begin, text } from "./connection.js";
import { bytes, names, percent, plural, relative, user } from "./format.js";
import { Table, progress, tag } from "./tables.js";
import { Treemap } from "./treemap.js";

const find = (id) => document.getElementById(id);

// Milliseconds between two questions. A survey of the disk and of the memory takes the daemon longer than a list.
const EVERY = { pulls: 1500, ps: 3000, df: 10_000, residency: 15_000, plans: 60_000 };

const LEGEND = [
  ["model", "one model only"], ["shared", "several models"], ["download", "unfinished downloads"],
  ["unneeded", "nothing needs it"], ["in_use", "removed, but in use"], ["trash", "trash"],
  ["quarantine", "damaged"], ["other", "other"],
];

const PART_NAMES = {
  shared: "shared, in smaller parts", in_use: "in use, of no model", staging: "imports and pulls", trash: "trash",
  quarantine: "quarantine", unneeded: "unneeded", records: "records", index: "index", audit: "audit log", reserve: "reserve",
  directories: "directories", other: "other files",
};

const treemap = new Treemap(find("treemap"), (detail) => { find("treemap-detail").textContent = detail; });

const sizes = (title, of) => ({ title, number: true, sort: (row) => of(row) ?? 0, text: (row) => sizeText(of(row)) });

/** A size, or a dash: of a model in a lower store it is not known what it shares. */
function sizeText(count) {
  return count === undefined ? "–" : bytes(count);
}

const tables = {
  parts: new Table(find("parts"), [
    { title: "Part", text: (part) => part.label, sort: (part) => part.label },
    { title: "Size", number: true, sort: (part) => part.bytes, text: (part) => bytes(part.bytes) },
    { title: "Needed by", text: (part) => part.by },
  ], { sorted: { column: 1, descending: true }, empty: "The store is empty." }),
  models: new Table(find("models"), [
    { title: "Model", sort: (model) => model.name, cell: modelName },
    sizes("Size", (model) => model.size),
    sizes("Unique", (model) => model.unique_bytes),
    sizes("Shared", (model) => model.shared_bytes),
    { title: "Shared with", text: (model) => names((model.shared_with ?? []).map((other) => other.name), 2) || "–" },
    { title: "Last opened", short: true, sort: (model) => Date.parse(model.last_opened ?? 0) || 0, text: lastOpened },
  ], { sorted: { column: 2, descending: true }, empty: "No model." }),
  pulls: new Table(find("pulls"), [
    { title: "Model", text: (pull) => pull.model },
    { title: "Done", cell: (pull) => progress(pull.completed_bytes, pull.total_bytes, `pull of ${pull.model}`) },
    { title: "Bytes", number: true, text: (pull) => `${bytes(pull.completed_bytes)} of ${pull.total_bytes === null ? "–" : bytes(pull.total_bytes)}` },
    { title: "Speed", number: true, text: (pull) => `${bytes(pull.bytes_per_second)}/s` },
    { title: "User", text: user },
    { title: "Since", short: true, text: (pull) => relative(pull.since) },
    { title: "Source", text: (pull) => pull.source },
    { title: "Now", text: (pull) => pull.status },
  ], { empty: "None." }),
  sessions: new Table(find("sessions"), [
    { title: "Model", text: (session) => session.model, sort: (session) => session.model },
    { title: "Process", number: true, text: (session) => { const pid = session.engine?.pid ?? session.pid; return pid > 0 ? String(pid) : "–"; }, sort: (session) => session.pid },
    { title: "Command", text: (session) => (session.engine?.command ?? session.command ?? "–") + (session.container ? ` in ${session.container}` : "") },
    { title: "User", text: user, sort: user },
    { title: "Since", short: true, text: (session) => relative(session.since), sort: (session) => Date.parse(session.since) },
    sizes("Mapped", (session) => session.bytes_mapped),
    { title: "In memory", number: true, text: inMemory },
  ], { empty: "No process has a model open." }),
  gc: new Table(find("gc"), [
    { title: "What", text: (row) => row.what },
    { title: "Of", text: (row) => row.of },
    { title: "Files", number: true, text: (row) => String(row.count) },
    { title: "Size", number: true, text: (row) => bytes(row.bytes) },
  ], { empty: "Nothing." }),
  eviction: new Table(find("eviction"), [
    { title: "Model", text: (eviction) => eviction.name },
    { title: "Freed so far", number: true, text: (eviction) => bytes(eviction.freed_bytes) },
    { title: "Last used", short: true, text: (eviction) => relative(eviction.last_used) },
    { title: "From", text: (eviction) => eviction.origin ?? "–" },
  ], { empty: "None." }),
};

/** What is known; each answer replaces a part of it. */
const known = { models: [], usage: null, residency: new Map(), pulls: new Map() };

function modelName(model) {
  const marks = [];
  if (model.pinned) marks.push(tag("pinned"));
  if (model.damage) marks.push(tag("damaged"));
  if (model.store) marks.push(tag(`in ${model.store}`));
  return [model.name, ...marks];
}

function lastOpened(model) {
  const when = relative(model.last_opened);
  return model.last_opened_by ? `${when} by ${user(model.last_opened_by)}` : when;
}

// By session: sessions with the same name may have different models open.
const sessionId = ({ pid, since, model }) => `${pid} ${since} ${model}`;

function inMemory(session) {
  const residency = known.residency.get(sessionId(session));
  return residency ? `${bytes(residency.resident)} (${percent(residency.resident, residency.bytes)})` : "–";
}

function showDisk(usage, { models, lower_stores: lowerStores = [] }) {
  known.usage = usage;
  // Those of lower stores take no space in this one, so the usage lacks them.
  const shares = new Map(usage.models.map((model) => [model.name, model]));
  known.models = models.map((model) => ({ ...(model.store ? {} : shares.get(model.name)), ...model }));
  showFigures(usage);
  showWarnings(lowerStores.filter((store) => store.problem));
  find("empty").hidden = models.length > 0;
  find("models-section").hidden = models.length === 0;
  const parts = diskParts(usage);
  find("disk-parts").hidden = usage.models.length === 0 && parts.every((part) => part.kind === "other");
  treemap.show(parts);
  tables.parts.show(parts);
  showModels();
}

function showFigures(usage) {
  const saved = usage.logical_bytes > 0 ? ` (${percent(usage.saved_bytes, usage.logical_bytes)})` : "";
  const inLower = known.models.filter((model) => model.store).length;
  const figures = [
    ["On disk", bytes(usage.disk_bytes)], ["Without sharing", bytes(usage.logical_bytes)],
    ["Saved by sharing", bytes(usage.saved_bytes) + saved],
    ["Can be freed", bytes(usage.reclaimable_bytes)], ["Models", String(known.models.length)],
    ...(inLower > 0 ? [["In lower stores", String(inLower)]] : []),
    ["Quota", usage.quota_bytes ? `${bytes(usage.used_bytes)} of ${bytes(usage.quota_bytes)}` : "none"],
    ["Free on the disk", bytes(usage.free_bytes)],
  ];
  find("figures").replaceChildren(...figures.map(([title, value]) => {
    const group = document.createElement("div");
    const [term, definition] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, definition.textContent] = [title, value];
    group.append(term, definition);
    return group;
  }));
}

/** Says which lower stores cannot be used. */
function showWarnings(stores) {
  const texts = stores.map(({ path, problem }) => {
    const reason = problem.includes(path) ? problem : `${path}: ${problem}`;
    return `A lower store cannot be used, so its models are not shown: ${reason}`;
  });
  const list = find("warnings");
  // Set only if they differ: each change is read aloud.
  if ([...list.children].map((line) => line.textContent).join("\n") === texts.join("\n")) return;
  list.replaceChildren(...texts.map((message) => {
    const line = document.createElement("p");
    [line.className, line.textContent] = ["warning", message];
    return line;
  }));
}

function showModels() {
  const wanted = find("filter").value.trim().toLowerCase();
  const shown = known.models.filter((model) => model.name.toLowerCase().includes(wanted));
  tables.models.show(shown);
  find("models-count").textContent = wanted ? `${shown.length} of ${plural(known.models.length, "model")}` : "";
}

/** The areas: what one model needs, what several share by who shares it, and the rest. They add up to the disk space. */
function diskParts(usage) {
  const parts = [];
  let inParts = 0;
  for (const [place, part] of (usage.shared_parts ?? []).entries()) {
    const by = names(part.models, 12, part.model_count);
    inParts += part.bytes;
    const label = `shared by ${names(part.models, 2, part.model_count)}`;
    parts.push(area(`shared ${place}`, "shared", label, part.bytes, by));
  }
  usage.rows.forEach((row, place) => {
    if (row.kind === "shared") {
      parts.push(area("shared", "shared", PART_NAMES.shared, row.bytes - inParts, "several models or the trash"));
    } else if (row.kind === "model") {
      parts.push(area(`model ${row.name}`, "model", row.name, row.bytes, `${row.name} only`));
    } else if (row.kind === "download") {
      const name = row.name ?? "a file";
      parts.push(area(`download ${place}`, "download", `download of ${name}`, row.bytes, `${received(row)} received`));
    } else {
      const kind = ["unneeded", "in_use", "trash", "quarantine"].includes(row.kind) ? row.kind : "other";
      parts.push(area(row.kind, kind, PART_NAMES[row.kind] ?? PART_NAMES.other, row.bytes, (row.by ?? []).join("; ")));
    }
  });
  return parts.filter((part) => part.bytes > 0);
}

function received(row) {
  return row.received_bytes === undefined ? "part" : row.size ? percent(row.received_bytes, row.size) : bytes(row.received_bytes);
}

function area(id, kind, label, size, by) {
  const detail = `${label}, ${bytes(size)}${by && by !== `${label} only` ? `: ${by}` : ""}`;
  return { id, kind, label, size: bytes(size), bytes: size, by: by || "–", detail };
}

function showPulls({ pulls }) {
  tables.pulls.show(pulls);
  const running = new Map(pulls.map((pull) => [`${pull.model} ${pull.since}`, pull.model]));
  const begun = [...running].filter(([id]) => !known.pulls.has(id)).map(([, model]) => `pull of ${model} begins`);
  const ended = [...known.pulls].filter(([id]) => !running.has(id)).map(([, model]) => `pull of ${model} has ended`);
  known.pulls = running;
  // Only changes are read aloud, not every step of the progress.
  if (begun.length + ended.length > 0) find("pulls-live").textContent = [...begun, ...ended].join("; ");
  if (ended.length > 0) polls.df.now();
}

function showSessions({ sessions }) {
  tables.sessions.show(sessions);
}

function noteResidency({ sessions }) {
  const told = sessions.filter((session) => session.resident_bytes !== undefined);
  known.residency = new Map(told.map((session) => [sessionId(session), { bytes: session.model_bytes, resident: session.resident_bytes }]));
  showSessions({ sessions });
}

const REASONS = {
  unreferenced_blob: "tensors and files", unreferenced_recipe: "recipes", expired_trash: "expired trash",
  abandoned_staging: "of an interrupted import or pull", abandoned_download: "abandoned downloads",
};

function showPlans(gc, eviction) {
  if (gc.error) {
    find("gc-text").textContent = text(gc.error);
  } else {
    find("gc-text").textContent = gc.freed_bytes > 0 ? `would free ${bytes(gc.freed_bytes)}:` : "would free nothing.";
    const groups = new Map();
    for (const { reason, of, size } of gc.deleted) {
      const id = JSON.stringify([reason, of]);
      const group = groups.get(id) ?? { what: REASONS[reason] ?? "other", of: of ?? "–", count: 0, bytes: 0 };
      group.count += 1;
      group.bytes += size;
      groups.set(id, group);
    }
    tables.gc.show([...groups.values()].sort((a, b) => b.bytes - a.bytes));
  }
  if (eviction.error) {
    find("eviction-text").textContent = text(eviction.error);
  } else {
    find("eviction-text").textContent = evictionText(eviction);
    tables.eviction.show(eviction.evicted);
  }
}

function evictionText({ policy, used_bytes, quota_bytes, needed_bytes, evicted, spared }) {
  if (policy === "never") return "is off: no model is removed to make space (space.evict in the configuration).";
  const limit = quota_bytes === null ? "there is no quota" : `${bytes(used_bytes)} of ${bytes(quota_bytes)} are used`;
  if (needed_bytes === 0) return `would remove nothing now: ${limit}. ${plural(spared.length, "model")} would never be removed.`;
  const what = evicted.length > 0 ? `would remove ${plural(evicted.length, "model")}` : "would not be enough, so it removes nothing";
  return `${what}: ${limit}, and ${bytes(needed_bytes)} are needed.`;
}

/** Asks regularly while the window is visible, and at once when it becomes visible or is asked to. */
class Poll {
  #interval;
  #work;
  #timer = null;
  #isRunning = false;

  constructor(interval, work) {
    this.#interval = interval;
    this.#work = work;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.now(); });
  }

  async now() {
    if (this.#isRunning) return;
    clearTimeout(this.#timer);
    this.#isRunning = true;
    try {
      if (!document.hidden) {
        await this.#work();
        report(this, null);
      }
    } catch (error) {
      report(this, error);
      if (error instanceof Refused) return;
    } finally {
      this.#isRunning = false;
    }
    this.#timer = setTimeout(() => this.now(), this.#interval);
  }
}

/** An answer, or an exception for an error of the daemon. */
async function answer(question) {
  const document = await ask(question);
  if (document.error) throw new Lost(text(document.error));
  return document;
}

const polls = {
  pulls: new Poll(EVERY.pulls, async () => showPulls(await answer("pulls"))),
  ps: new Poll(EVERY.ps, async () => showSessions(await answer("ps"))),
  df: new Poll(EVERY.df, async () => showDisk(...await Promise.all([answer("df?detail=12"), answer("models")]))),
  residency: new Poll(EVERY.residency, async () => noteResidency(await answer("ps?residency=true"))),
  // A user who may not collect is told so, which is no failure.
  plans: new Poll(EVERY.plans, async () => {
    find("store").textContent = (await answer("version")).root;
    showPlans(...await Promise.all([ask("gc"), ask("eviction")]));
  }),
};

/** What fails now, by who has asked. */
const problems = new Map();

/** Shows the problems; `error` is null if there is none any more. */
function report(source, error) {
  if (error === null) problems.delete(source);
  else problems.set(source, error);
  const [first] = problems.values();
  // Set only if it differs: each change of these texts is read aloud.
  const set = (id, message) => { if (find(id).textContent !== message) find(id).textContent = message; };
  set("problem", first ? first instanceof Lost || first instanceof Refused ? first.message : String(first) : "");
  find("problem").hidden = !first;
  set("status", !first ? "live" : first instanceof Refused ? "no session" : "no answer, trying again");
  document.documentElement.dataset.state = first ? "lost" : "live";
}

async function start() {
  find("legend").replaceChildren(...LEGEND.map(([kind, title]) => {
    const [item, colour] = [document.createElement("li"), document.createElement("span")];
    colour.className = kind;
    item.append(colour, title);
    return item;
  }));
  for (const table of Object.values(tables)) table.show([]);
  find("filter").addEventListener("input", showModels);
  find("refresh").addEventListener("click", () => Object.values(polls).forEach((poll) => poll.now()));
  // A new link was opened in this window.
  addEventListener("hashchange", () => location.reload());
  try {
    await begin();
  } catch (error) {
    report(start, error);
    return;
  }
  Object.values(polls).forEach((poll) => poll.now());
}

start();
