// Asks again and again what the store contains and who uses it, and shows it.

import { ActionDialog, actionButton, showButtons } from "./action_dialog.js";
import { collect, moveToTrash, pin, restore, undo } from "./actions.js";
import { Lost, Refused, ask, begin, get, text } from "./connection.js";
import { distinctModels, families, parts as nameParts, short } from "./families.js";
import { bytes, count, names, percent, plural, relative, user } from "./format.js";
import { Layers, compare, summary } from "./layers.js";
import { Matrix } from "./matrix.js";
import { showOverview } from "./overview.js";
import { Panel, about } from "./panel.js";
import { save } from "./picture.js";
import { Poll } from "./poll.js";
import { ended, limitPulls, pull, stop } from "./pulling.js";
import { canAct, learnRights, whyNot, whyNotName } from "./rights.js";
import { Table, made, tag } from "./tables.js";
import { Treemap } from "./treemap.js";
import { Updates, release } from "./updates.js";
import { Work } from "./work.js";

const find = (id) => document.getElementById(id);
const tell = (id) => (detail) => { find(id).textContent = detail; };

// Milliseconds between two questions. A survey of the disk and of the memory takes the daemon longer than a list.
const EVERY = { pulls: 1500, ps: 3000, df: 10_000, residency: 15_000, plans: 60_000 };

/** How many sharers are asked for per model. */
const SHARERS = 60;
/** How many rows the table of models has until all are asked for. */
const ROWS = 50;

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

const size = (title, of, others) => ({ title, number: true, ...others, sort: (row) => of(row) ?? 0, text: (row) => sizeText(of(row)) });

/** A size, or a dash: of a model in a lower store it is not known what it shares. */
function sizeText(bytesOrNone) {
  return bytesOrNone === undefined ? "–" : bytes(bytesOrNone);
}

/** What is known; each answer replaces a part of it. `facts` is by the digest of the model. */
const known = { models: [], facts: new Map(), groups: [], begun: { pid: 0, pulls: [] }, dismissed: new Set() };

const work = new Work(() => polls.df.now(), { stop: stopButton, release: releaseButton, settle: () => dialog.settle() });
const dialog = new ActionDialog(() => Object.values(polls).forEach((poll) => poll.now()));
const updates = canAct && new Updates(dialog, known);
const panel = new Panel((one, other) => showPair(one, other, true), actionsFor);
const open = (name) => {
  const model = known.models.find((other) => other.name === name);
  if (model) panel.open(model, known.facts.get(model.digest)).catch(() => {});
};
const treemap = new Treemap(find("treemap"), tell("treemap-detail"), open);
const matrix = new Matrix(find("matrix"), find("matrix-note"), tell("matrix-detail"), (one, other) => showPair(one, other, true));
const layers = new Layers(find("layers"), tell("layers-detail"));

const onDisk = (model) => (model.unique_bytes === undefined ? undefined : model.unique_bytes + model.shared_bytes);
const sharedPart = (model) => (onDisk(model) > 0 ? model.shared_bytes / onDisk(model) : 0);
const factOf = (model) => known.facts.get(model.digest) ?? {};

const tables = {
  parts: new Table(find("parts"), [
    { title: "Part", text: (part) => part.title, sort: (part) => part.title },
    { title: "Size", number: true, sort: (part) => part.bytes, text: (part) => bytes(part.bytes) },
    { title: "Needed by", text: (part) => part.by },
  ], { sorted: { column: 1, descending: true }, empty: "The store is empty." }),
  models: new Table(find("models"), [
    { title: "Model", sort: (model) => model.name, text: (model) => model.name, cell: modelName },
    { title: "Quant", optional: true, isWide: true, text: (model) => factOf(model).quantization ?? "–", sort: (model) => factOf(model).quantization ?? "" },
    { title: "Parameters", number: true, optional: true, isWide: true, text: (model) => (factOf(model).parameters ? count(factOf(model).parameters) : "–"), sort: (model) => factOf(model).parameters ?? 0 },
    size("As files", (model) => model.size, { isWide: true }),
    size("On disk", onDisk, { optional: true }),
    { title: "Shared", number: true, optional: true, sort: sharedPart, text: (model) => (onDisk(model) > 0 && model.shared_bytes > 0 ? percent(model.shared_bytes, onDisk(model)) : "–") },
    { title: "In memory", number: true, optional: true, isWide: true, text: (model) => work.memoryOf(model.name) },
    { title: "Last opened", short: true, optional: true, isWide: true, sort: (model) => Date.parse(model.last_opened ?? 0) || 0, text: lastOpened },
  ], { sorted: { column: 3, descending: true }, empty: "No model.", most: ROWS }),
  gc: new Table(find("gc"), [
    { title: "What", text: (row) => row.what },
    { title: "Of", text: (row) => row.of },
    { title: "Files", number: true, text: (row) => String(row.count) },
    { title: "Size", number: true, text: (row) => bytes(row.bytes) },
  ], { empty: "Nothing." }),
  trash: new Table(find("trash"), [
    { title: "Model", text: (model) => model.name },
    { title: "As files", number: true, isWide: true, text: (model) => bytes(model.size) },
    { title: "Removed", short: true, isWide: true, text: (model) => relative(model.removed) + (model.replaced ? ", replaced" : "") },
    { title: "Kept until", short: true, text: (model) => relative(model.expires) },
    ...(canAct ? [{ title: "Action", cell: restoreButton }] : []),
  ]),
  eviction: new Table(find("eviction"), [
    { title: "Model", text: (eviction) => eviction.name },
    { title: "Freed so far", number: true, text: (eviction) => bytes(eviction.freed_bytes) },
    { title: "Last used", short: true, text: (eviction) => relative(eviction.last_used) },
    { title: "From", text: (eviction) => eviction.origin ?? "–" },
  ], { empty: "None." }),
};

/** The buttons of what can be done with a model. */
function actionsFor(model) {
  if (!canAct) return [];
  const reason = whyNotName(model);
  return [
    actionButton("pin", model.pinned ? "Unpin …" : "Pin …", reason, () => dialog.open(pin(model))),
    actionButton("trash", "Move to the trash …", reason, () => dialog.open(moveToTrash(model, work.programsOf(model.name)))),
  ];
}

/** The button that stops a pull which this page has begun; none for others. */
function stopButton(running) {
  const own = known.begun.pulls.findLast((begun) => begun.state === "running" && begun.source === running.source);
  if (!canAct || running.kind !== "pull" || !own || (running.pid > 0 && running.pid !== known.begun.pid)) return undefined;
  const button = actionButton(`stop ${own.id}`, "Stop …", "", () => dialog.open(stop(own, running)));
  button.setAttribute("aria-label", `Stop the pull of ${running.model}`);
  button.dataset.row = button.dataset.action;
  return button;
}

function releaseButton(session) {
  if (!canAct) return undefined;
  const action = () => release(session, work.sessions);
  const button = actionButton(`release ${session.pid} ${session.since} ${session.model}`, "Release …", action().reason, () => dialog.open(action()));
  button.setAttribute("aria-label", `Release what process ${session.pid} has open`);
  button.dataset.row = button.dataset.action;
  return button;
}

/** The buttons of actions that no model, pull or session has. */
function showActions() {
  if (!canAct) return;
  showButtons(find("header-actions"), [
    actionButton("pull", "Pull a model …", whyNot("pull"), () => dialog.open(pull(known.models))),
    actionButton("undo", "Undo …", whyNot("pull"), () => dialog.open(undo())),
  ]);
  showButtons(find("pulls-actions"), [actionButton("limit", "Limit the speed …", whyNot("admin"), () => dialog.open(limitPulls()))]);
}

/** How the pulls that this page has begun have ended, until that is dismissed. */
function showResults() {
  const results = ended(known.begun).filter(({ id }) => !known.dismissed.has(id));
  // Set only if they differ: each change is read aloud.
  const state = results.map(({ id }) => id).join(" ");
  if (find("results").dataset.state === state) return;
  find("results").dataset.state = state;
  find("results").replaceChildren(...results.map(({ id, message, isFailure }) => {
    const button = made("button", "Dismiss");
    button.type = "button";
    button.addEventListener("click", () => {
      known.dismissed.add(id);
      showResults();
      find("refresh").focus();
    });
    return made("li", [made("span", message), button], isFailure ? "problem" : "result");
  }));
}

function restoreButton(trashed) {
  const button = actionButton(`restore ${trashed.name} ${trashed.removed}`, "Restore …", whyNotName(trashed), () => dialog.open(restore(trashed, known.models)));
  button.setAttribute("aria-label", `Restore ${trashed.name}`);
  button.dataset.row = button.dataset.action;
  return button;
}

function modelName(model) {
  const button = made("button", model.name, "link");
  button.type = "button";
  button.dataset.row = model.name;
  button.addEventListener("click", () => open(model.name));
  const marks = [];
  if (model.pinned) marks.push(tag("pinned"));
  if (model.damage) marks.push(tag("damaged"));
  if (model.store) marks.push(tag(`in ${model.store}`));
  return [button, ...marks];
}

function lastOpened(model) {
  if (!model.last_opened) return "–";
  const when = relative(model.last_opened);
  return model.last_opened_by ? `${when} by ${user(model.last_opened_by)}` : when;
}

function showDisk(usage, { models, lower_stores: lowerStores = [] }) {
  // Those of lower stores take no space in this one, so the usage lacks them.
  const shares = new Map(usage.models.map((model) => [model.name, model]));
  known.models = models.map((model) => ({ ...(model.store ? {} : shares.get(model.name)), ...model }));
  const distinct = distinctModels(usage);
  known.groups = families(distinct);
  showOverview(usage, known.models);
  showWarnings(lowerStores.filter((store) => store.problem));
  find("empty").hidden = models.length > 0;
  find("models-section").hidden = models.length === 0;
  const boxes = diskBoxes(usage);
  const areas = boxes.flatMap((box) => box.parts);
  find("disk-parts").hidden = usage.models.length === 0 && areas.every((part) => part.kind === "other");
  // The reserve is no use of the space, and would hide a small store.
  treemap.show(boxes.filter((box) => box.id !== "reserve"));
  tables.parts.show(areas);
  showLegend(new Set(areas.map((part) => part.kind)));
  showModels();
  find("matrix-section").hidden = !matrix.show(known.groups);
  offerPairs(distinct);
  // For measurements.
  performance.mark("models");
  panel.update(known.models, factOf);
  if (updates) updates.note(known.models);
  askFacts();
}

function showTrash({ models }) {
  tables.trash.show(models);
  find("trash-section").hidden = models.length === 0;
}

function showLegend(kinds) {
  const shown = LEGEND.filter(([kind]) => kinds.has(kind));
  if (find("legend").children.length === shown.length) return;
  find("legend").replaceChildren(...shown.map(([kind, title]) => made("li", [made("span", "", kind), title])));
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
  list.replaceChildren(...texts.map((message) => made("p", message, "warning")));
}

function showModels() {
  const wanted = find("filter").value.trim().toLowerCase();
  const shown = known.models.filter((model) => model.name.toLowerCase().includes(wanted));
  tables.models.show(shown);
  find("models-count").textContent = wanted ? `${shown.length} of ${plural(known.models.length, "model")}` : "";
  const isCut = tables.models.visible.length < shown.length;
  find("models-all").hidden = !isCut;
  find("models-all").textContent = `Show all ${shown.length}`;
}

/** The boxes: a family with what each model needs alone and what several share, and the rest. They add up to the disk space. */
function diskBoxes(usage) {
  const familyOf = new Map(known.groups.flatMap((group) => group.models.map((model) => [model.name, group])));
  const boxes = new Map(known.groups.map((group) => [group, { id: group.id, label: group.label, parts: [] }]));
  const others = [];
  const alone = (part) => others.push({ id: part.id, label: part.label, parts: [part] });
  const place = (family, part) => (boxes.has(family) ? boxes.get(family).parts.push(part) : alone(part));
  let inParts = 0;
  for (const [number, part] of (usage.shared_parts ?? []).entries()) {
    inParts += part.bytes;
    const title = `shared by ${names(part.models, 2, part.model_count)}`;
    const isOfAll = part.model_count === familyOf.get(part.models[0])?.models.length;
    const all = part.model_count === 2 ? "both share" : `all ${part.model_count} share`;
    const label = isOfAll ? all : `${part.model_count} share`;
    place(familyOf.get(part.models[0]), area(`shared ${number}`, "shared", { label, title }, part.bytes, names(part.models, 12, part.model_count)));
  }
  usage.rows.forEach((row, number) => {
    if (row.kind === "shared") {
      alone(area("shared", "shared", { label: PART_NAMES.shared }, row.bytes - inParts, "several models or the trash"));
    } else if (row.kind === "model") {
      const family = familyOf.get(row.name);
      const also = row.other_names?.length ? ` and ${plural(row.other_names.length, "other name")}` : "";
      const part = area(`model ${row.name}`, "model", { label: ownLabel(row.name, family), title: row.name + also }, row.bytes, `${row.name + also} only`);
      place(family, { ...part, model: row.name });
    } else if (row.kind === "download") {
      const name = row.name ?? "a file";
      alone(area(`download ${number}`, "download", { label: `download of ${name}` }, row.bytes, `${received(row)} received`));
    } else {
      const kind = ["unneeded", "in_use", "trash", "quarantine"].includes(row.kind) ? row.kind : "other";
      alone(area(row.kind, kind, { label: PART_NAMES[row.kind] ?? PART_NAMES.other }, row.bytes, (row.by ?? []).join("; ")));
    }
  });
  return [...boxes.values(), ...others].map((box) => ({ ...box, parts: box.parts.filter((part) => part.bytes > 0) }));
}

/** The last part and the tag; in a box with the same name only the tag. */
function ownLabel(name, family) {
  const [last, tagged] = nameParts(name);
  return family.models.length > 1 && last === family.label && tagged && tagged !== "latest" ? tagged : short(name);
}

function received(row) {
  return row.received_bytes === undefined ? "part" : row.size ? percent(row.received_bytes, row.size) : bytes(row.received_bytes);
}

function area(id, kind, { label, title = label }, partBytes, by) {
  const detail = `${title}, ${bytes(partBytes)}${by && by !== `${title} only` ? `: ${by}` : ""}`;
  return { id, kind, label, title, size: bytes(partBytes), bytes: partBytes, by: by || "–", detail };
}

/** Asks for the quantisation and the parameters of the models in view, one after the other, once each. */
async function askFacts() {
  if (askFacts.isRunning) return;
  askFacts.isRunning = true;
  try {
    for (const model of tables.models.visible) {
      if (known.facts.has(model.digest) || document.hidden) continue;
      await details(model.name);
    }
    showModels();
  } catch {
    // The polls tell what is wrong.
  } finally {
    askFacts.isRunning = false;
    document.documentElement.dataset.facts = "known";
  }
}

/** The details of a model; an error of the daemon if it has none. The facts in it are kept. */
async function details(name) {
  const model = known.models.find((other) => other.name === name);
  const found = await ask(about("models", name));
  const { architecture, quantization, parameters } = found;
  if (model) known.facts.set(model.digest, { architecture, quantization, parameters });
  return found;
}

/** Fills the choices of the comparison, and shows the pair that shares the most at first. */
function offerPairs(distinct) {
  const able = known.groups.flatMap((group) => group.models).map((model) => model.name);
  find("layers-section").hidden = able.length < 2 || !distinct.some((model) => model.shares.size > 0);
  const state = able.join("\n");
  if (find("layers-section").hidden || offerPairs.state === state) return;
  const isFirst = offerPairs.state === undefined;
  offerPairs.state = state;
  const chosen = ["layers-one", "layers-other"].map((id) => find(id).value);
  for (const id of ["layers-one", "layers-other"]) {
    find(id).replaceChildren(...able.map((name) => { const option = made("option", name); option.value = name; return option; }));
  }
  const pairs = distinct.flatMap((model) => [...model.shares].map(([other, shared]) => [shared, model.name, other]));
  const [, one, other] = pairs.reduce((best, pair) => (pair[0] > best[0] ? pair : best), [0, able[0], able[1]]);
  if (isFirst || chosen.some((name) => !able.includes(name))) showPair(one, other, false);
  else [find("layers-one").value, find("layers-other").value] = chosen;
}

/** Compares the layers of two models. */
async function showPair(one, other, isAsked) {
  [find("layers-one").value, find("layers-other").value] = [one, other];
  if (isAsked) {
    find("layers-section").scrollIntoView({ block: "start" });
    find("layers-one").focus({ preventScroll: true });
  }
  try {
    const found = [await details(one), await details(other)];
    if (find("layers-one").value !== one || find("layers-other").value !== other) return;
    const failed = found.find((answer) => answer.error);
    const compared = failed ? { layers: [], total: { same: 0, differs: 0, only: 0 } } : compare(found[0].tensors, found[1].tensors);
    find("layers-summary").textContent = failed ? text(failed.error) : summary(compared);
    find("layers-detail").textContent = "";
    layers.show(compared);
  } catch (error) {
    find("layers-summary").textContent = error.message;
  }
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
    for (const { reason, of, size: freed } of gc.deleted) {
      const id = JSON.stringify([reason, of]);
      const group = groups.get(id) ?? { what: REASONS[reason] ?? "other", of: of ?? "–", count: 0, bytes: 0 };
      group.count += 1;
      group.bytes += freed;
      groups.set(id, group);
    }
    tables.gc.show([...groups.values()].sort((a, b) => b.bytes - a.bytes));
  }
  find("eviction-text").textContent = eviction.error ? text(eviction.error) : evictionText(eviction);
  if (!eviction.error) tables.eviction.show(eviction.evicted);
  if (canAct) showButtons(find("gc-actions"), [actionButton("gc", "Delete it …", whyNot("admin"), () => dialog.open(collect()))]);
  find("gc-part").hidden = !gc.error && gc.freed_bytes === 0;
  find("eviction-part").hidden = !eviction.error && eviction.needed_bytes === 0;
  find("free-section").hidden = find("gc-part").hidden && find("eviction-part").hidden;
}

function evictionText({ policy, used_bytes: used, quota_bytes: quota, needed_bytes: needed, evicted, spared }) {
  if (policy === "never") return "is off: no model is removed to make space (space.evict in the configuration).";
  const limit = quota === null ? "there is no quota" : `${bytes(used)} of ${bytes(quota)} are used`;
  if (needed === 0) return `would remove nothing now: ${limit}. ${plural(spared.length, "model")} would never be removed.`;
  const what = evicted.length > 0 ? `would remove ${plural(evicted.length, "model")}` : "would not be enough, so it removes nothing";
  return `${what}: ${limit}, and ${bytes(needed)} are needed.`;
}

/** An answer, or an exception for an error of the daemon. */
async function answer(question) {
  const document = await ask(question);
  if (document.error) throw new Lost(text(document.error));
  return document;
}

const polls = {
  pulls: new Poll(EVERY.pulls, async () => {
    if (canAct) known.begun = await get("/begun");
    work.showPulls(await answer("pulls"));
    showResults();
  }, report),
  ps: new Poll(EVERY.ps, async () => work.showSessions(await answer("ps")), report),
  df: new Poll(EVERY.df, async () => {
    const [usage, models, trash] = await Promise.all([answer(`df?detail=${SHARERS}`), answer("models"), answer("trash")]);
    showDisk(usage, models);
    showTrash(trash);
    dialog.settle();
  }, report),
  residency: new Poll(EVERY.residency, async () => {
    work.noteResidency(await answer("ps?residency=true"));
    showModels();
  }, report),
  // A user who may not collect is told so, which is no failure.
  plans: new Poll(EVERY.plans, async () => {
    find("store").textContent = (await answer("version")).root;
    if (canAct) await learnRights();
    showActions();
    showPlans(...await Promise.all([ask("gc"), ask("eviction")]));
    dialog.settle();
  }, report),
};

/** What fails now, by who has asked. */
const problems = new Map();

/** Shows the problems; `error` is null if there is none any more. */
function report(source, error) {
  if (error === null) problems.delete(source);
  else problems.set(source, error);
  const [first] = problems.values();
  work.showProblem(first ? first instanceof Lost || first instanceof Refused ? first.message : String(first) : "");
  const status = !first ? "live" : first instanceof Refused ? "no session" : "no answer, trying again";
  // Set only if it differs: each change is read aloud.
  if (find("status").textContent !== status) find("status").textContent = status;
  document.documentElement.dataset.state = first ? "lost" : "live";
}

async function start() {
  find("filter").addEventListener("input", showModels);
  find("models-all").addEventListener("click", () => { tables.models.showAll(); showModels(); askFacts(); });
  for (const id of ["layers-one", "layers-other"]) {
    find(id).addEventListener("change", () => showPair(find("layers-one").value, find("layers-other").value, false));
  }
  find("matrix-save").addEventListener("click", () => save(find("matrix"), "blobd-shared"));
  find("layers-save").addEventListener("click", () => save(find("layers"), "blobd-layers"));
  find("refresh").addEventListener("click", () => Object.values(polls).forEach((poll) => poll.now()));
  // A new link was opened in this window.
  addEventListener("hashchange", () => location.reload());
  try {
    await begin();
  } catch (error) {
    report(start, error);
    return;
  }
  // Without an answer, the actions say so until the plans are asked for.
  if (canAct) await learnRights().catch(() => {});
  showActions();
  Object.values(polls).forEach((poll) => poll.now());
}

start();
