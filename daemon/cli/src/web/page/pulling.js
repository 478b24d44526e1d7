// Pulls on the page: what one would download, its begin and end, its speed, and the newer versions of stored models.

import { checked, sent } from "./actions.js";
import { ask, post, text } from "./connection.js";
import { short } from "./families.js";
import { bytes, names, plural } from "./format.js";
import { whyNot, whyNotName } from "./rights.js";

/** The command runs no more at a time. */
const MOST_PULLS = 16;

const RATE = { label: "At most, in MB per second (optional)", type: "number" };

/** A rate that was given in MB per second, as the daemon takes it; `null` for none. */
function rate(value) {
  return Number(value) > 0 ? Math.round(Number(value) * 1e6) : null;
}

/** What a pull with these parameters would do, as `pull --dry-run` says it. */
async function plan(request) {
  const planned = await sent("pull/plan", request);
  const { needed_bytes: needed, missing_bytes: missing } = planned.space;
  if (!planned.enough_space) throw new Error(`There is no room for it: it needs ${bytes(needed)} and ${bytes(missing)} are missing. Remove models first, or delete what no model needs.`);
  return planned;
}

const sum = (items, key) => items.reduce((total, item) => total + item[key], 0);
const kept = "It can be stopped at any time; what has been received is kept.";

/** The space that pulls take, and the models that are removed for it. */
function room(spaces) {
  const [needed, available] = [sum(spaces, "needed_bytes"), Math.min(...spaces.map((space) => space.available_bytes))];
  const evicted = spaces.flatMap((space) => space.evicted ?? []);
  const missing = spaces.length > 1 && needed > available ? [`There may be no room for all of them: ${bytes(needed - available)} are missing. Pulls that do not fit fail.`] : [];
  return [
    `${spaces.length > 1 ? "They take" : "It takes"} ${bytes(needed)} of ${bytes(available)} that may be stored.`, ...missing,
    ...(evicted.length > 0 ? [`To make room, these models will be removed: ${names(evicted.map((model) => model.name), 5)}.`] : []),
  ];
}

/** The effects of a pull with these parameters. `models` are those that are stored. */
async function planned(request, models) {
  const { download_bytes: download, files, chosen, space, ...found } = await plan(request);
  const there = [["stored_bytes", "stored already"], ["similar_bytes", "equal to those of stored models"], ["resumed_bytes", "received by an earlier pull"]];
  const reused = there.map(([key, what]) => [sum(files, key), what]).filter(([size]) => size > 0);
  const effects = [
    `${bytes(download)} will be downloaded of ${bytes(sum(files, "size"))} in ${plural(files.length, "file")}.`,
    ...(reused.length > 0 ? [`Of the rest, ${reused.map(([size, what]) => `${bytes(size)} are ${what}`).join(", ")}.`] : []),
    ...(chosen?.files.length > 0 ? [`Chosen: ${names(chosen.files.map((file) => file.path), 3)}.`] : []),
    ...(chosen?.notes ?? []),
    ...room([space]),
    ...replaced(found, models),
  ];
  return { effects, way: kept, confirm: `Pull ${bytes(download)}` };
}

function replaced(plan, models) {
  const there = models.find((model) => model.name === plan.name);
  if (!there || there.digest === plan.digest) return [];
  return [`The name ${plan.name} means another model now. If that follows this source, it goes to the trash, from where it can be restored; otherwise the pull is refused.`];
}

async function begin(request) {
  await sent("pull", request);
  return { done: "The pull has begun; the top of the page shows its progress." };
}

export function pull(models) {
  const requestOf = ({ source, name, limit }) => ({
    reference: source, ...(name ? { name } : {}), ...(rate(limit) ? { limit_rate: rate(limit) } : {}),
  });
  return {
    title: "Pull a model", confirm: "Pull", check: "Look up its size", isAsking: true, reason: whyNot("pull"),
    fields: [
      { id: "source", label: "Model", hint: "llama3:8b, hf.co/USER/REPOSITORY:Q4_K_M, or the URL of a GGUF file" },
      { id: "name", label: "Name in the store (optional)" }, { id: "limit", ...RATE },
    ],
    preview: (values) => {
      if (!values.source) throw new Error("Which model? Give its name or its URL.");
      return planned(requestOf(values), models);
    },
    run: (values) => begin(requestOf(values)),
  };
}

/** Why the user may not pull a newer version of a model; empty if it may. */
export function whyNotUpdate(model) {
  return whyNotName(model) || (model.pinned ? "The model is pinned, so no pull replaces it: unpin it first." : "");
}

/** Pulls the newer version of a model; its `request` is what the command has found. */
export function update(model, models) {
  const { name, request } = model;
  return {
    title: `Update ${name}`, confirm: "Pull", reason: whyNotUpdate(model),
    preview: () => planned(request, models), run: () => begin(request),
  };
}

/** Pulls the newer versions of several models: as many as the command runs at a time. */
export function updateAll(outdated) {
  let ready = [];
  return {
    title: `Update ${plural(outdated.length, "model")}`, confirm: "Pull all", reason: whyNot("pull"),
    preview: async () => {
      const asked = await Promise.allSettled(outdated.slice(0, MOST_PULLS).map(async (model) => ({ model, ...await plan(model.request) })));
      ready = asked.filter(({ status }) => status === "fulfilled").map(({ value }) => value);
      const failures = asked.flatMap(({ reason }, place) => (reason ? [`${outdated[place].name} is left out: ${reason.message}`] : []));
      if (ready.length === 0) throw new Error(failures.join(" "));
      const download = sum(ready, "download_bytes");
      const each = ready.map((found) => `${found.model.name} (${bytes(found.download_bytes)})`);
      const effects = [
        `${bytes(download)} will be downloaded for ${plural(ready.length, "model")}: ${names(each, 8)}.`, ...failures,
        ...room(ready.map((found) => found.space)),
        "The versions that are replaced go to the trash, from where they can be restored.",
        ...(outdated.length > MOST_PULLS ? [`The other ${outdated.length - MOST_PULLS} can be updated when these have ended.`] : []),
      ];
      return { effects, way: kept, confirm: `Pull ${bytes(download)}` };
    },
    run: async () => {
      for (const { model } of ready) await sent("pull", model.request);
      return { done: `${plural(ready.length, "pull has", "pulls have")} begun; the top of the page shows the progress.` };
    },
  };
}

/** What a pull of this page is called. */
const title = ({ source, request }) => request.name ?? short(source);

/** Stops a pull that this page has begun. */
export function stop(begun, running) {
  const { id, request } = begun;
  return {
    title: `Stop the pull of ${title(begun)}`, confirm: "Stop", reason: "",
    preview: () => ({ effects: [`${bytes(running.completed_bytes)} are there, and are kept: a pull of the same model goes on from there.`], way: "Pulling it again takes it back." }),
    run: async () => {
      checked(await post("/stop", { id }));
      return { done: "The pull is stopped.", back: { run: () => begin(request) } };
    },
  };
}

/** Limits the speed of all pulls together. */
export function limitPulls() {
  const told = (limit) => (limit === null ? "no limit" : `${bytes(limit)}/s`);
  const set = (limit) => sent("limit", { bytes_per_second: limit });
  let before = null;
  return {
    title: "Limit the speed of all pulls and pushes", confirm: "Set", check: "Check", isAsking: true, reason: whyNot("admin"),
    fields: [{ id: "limit", ...RATE, hint: "Empty for no limit. It holds for all users, until the daemon stops." }],
    preview: async ({ limit }) => {
      before = checked(await ask("limit")).bytes_per_second;
      return { effects: [`All pulls and pushes together: ${told(rate(limit))}; now: ${told(before)}.`], way: "Setting it again takes it back." };
    },
    run: async ({ limit }) => {
      const { bytes_per_second: now } = await set(rate(limit));
      return { done: `All pulls and pushes together: ${told(now)}.`, back: { run: async () => ({ done: `All pulls and pushes together: ${told((await set(before)).bytes_per_second)}.` }) } };
    },
  };
}

/** The pulls of this page that have ended, as texts: `{id, message, isFailure}`. */
export function ended({ pulls }) {
  return pulls.filter((pull) => pull.state !== "running").map((pull) => {
    const { id, state, error, pulled } = pull;
    if (state === "failed") return { id, message: `The pull of ${title(pull)} has failed: ${text(error)}`, isFailure: true };
    if (state === "stopped") return { id, message: `The pull of ${title(pull)} was stopped; what was received is kept.` };
    const size = pulled.unchanged ? "unchanged" : `${bytes(pulled.downloaded_bytes)} downloaded, ${bytes(pulled.reused_bytes + pulled.already_stored_bytes)} reused`;
    return { id, message: `${pulled.name} is pulled: ${[size, ...(pulled.notes ?? [])].join("; ")}.` };
  });
}
