// What can be done with models and with the store: what each action will do, how it is sent, and how it is taken back.

import { act, ask, text } from "./connection.js";
import { bytes, day, id, names, plural, relative } from "./format.js";
import { whyNot, whyNotName } from "./rights.js";

/** For how long the trash keeps a model that is removed here, unless another time is given. */
const KEEP_DAYS = 7;
const DAY = 86_400;

const NO_WAY_BACK = "This cannot be taken back.";

/** The answer to an action, or an exception for an error of the daemon. */
export async function sent(action, parameters) {
  return checked(await act(action, parameters));
}

export function checked(answer) {
  if (answer.error) throw new Error(text(answer.error));
  return answer;
}

export function pin(model, pinned = !model.pinned) {
  const what = pinned ? "Pin" : "Unpin";
  return {
    title: `${what} ${model.name}`, confirm: what, reason: whyNotName(model),
    preview: () => pinned
      ? { effects: ["The model will be neither removed nor evicted, and no pull will replace it."], way: "Unpinning takes it back." }
      : { effects: ["The model may be removed, replaced by a pull, and evicted if the configuration says so."], way: "Pinning takes it back." },
    run: async () => {
      const { name } = await sent("pin", { reference: model.name, pinned });
      return { done: pinned ? `${name} is pinned.` : `${name} is not pinned any more.`, back: pin(model, !pinned) };
    },
  };
}

/** `programs` are those that have the model open. */
export function moveToTrash(model, programs) {
  const requestOf = ({ days }) => {
    if (!(Number(days) > 0)) throw new Error(`Days in the trash: expected a number above 0, found “${days}”.`);
    return { references: [model.name], keep_seconds: Math.ceil(Number(days) * DAY) };
  };
  return {
    title: `Move ${model.name} to the trash`, confirm: "Move to the trash", reason: whyNotName(model), check: "Check",
    fields: [{ id: "days", label: "Days in the trash", type: "number", value: KEEP_DAYS }],
    preview: async (values) => {
      // Fails if the model may not be removed.
      await sent("remove", { ...requestOf(values), dry_run: true });
      const kept = values.days === "1" ? "1 day" : `${values.days} days`;
      const after = model.unique_bytes === undefined ? "" : `: then a collection frees ${bytes(model.unique_bytes)}`;
      const shared = model.shared_bytes > 0 ? `, and ${bytes(model.shared_bytes)} stay for the models that share them` : "";
      const effects = [`The trash keeps the model for ${kept}${after}${shared}.`, "Nothing is freed before that."];
      if (programs.length > 0) effects.push(`It is open in ${names(programs, 3)}, which can go on using it.`);
      return { effects, way: `Under Trash on this page it can be restored for ${kept}.` };
    },
    run: async (values) => {
      const { trashed_until: until } = await sent("remove", requestOf(values));
      return { done: `${model.name} is in the trash until ${day(until)}.`, back: restore({ ...model, expires: until }, []) };
    },
  };
}

/** `models` are those that are stored now: one may have the name. */
export function restore(trashed, models) {
  const isTaken = (name) => models.some((model) => model.name === name);
  const free = isTaken(trashed.name) ? `${trashed.name}-restored` : trashed.name;
  return {
    title: `Restore ${trashed.name}`, confirm: "Restore", reason: whyNotName(trashed), check: "Check the name",
    fields: [{ id: "name", label: "Name", value: free }],
    preview: ({ name }) => {
      if (isTaken(name)) throw new Error(`${name}: another model has this name: choose another one.`);
      const taken = isTaken(trashed.name) ? [`Another model is called ${trashed.name} now; it stays as it is.`] : [];
      return { effects: [`The model of ${bytes(trashed.size)} is a model of the store again, called ${name}.`, ...taken], way: "Moving it to the trash takes it back." };
    },
    run: async ({ name = trashed.name }) => {
      const reference = `${trashed.name}@${trashed.digest}`;
      const restored = await sent("undelete", name === trashed.name ? { reference } : { reference, name });
      return { done: `${restored.name} is restored.` };
    },
  };
}

export function collect() {
  return {
    title: "Collect what no model needs", confirm: "Delete", reason: whyNot("admin"),
    preview: async () => {
      const plan = checked(await ask("gc"));
      if (plan.deleted.length === 0 && plan.freed_bytes === 0) throw new Error("There is nothing to delete.");
      const files = plan.deleted.length + (plan.unlisted?.files ?? 0);
      const effects = [`${plural(files, "file")} will be deleted, which frees ${bytes(plan.freed_bytes)}. The table under “What would be freed” lists them.`];
      const expired = plan.deleted.filter((item) => item.reason === "expired_trash").length;
      if (expired > 0) effects.push(`${plural(expired, "of them is", "of them are")} of models whose time in the trash is over.`);
      if (plan.lower_stores?.length > 0) effects.push("Lower stores are not collected.");
      return { effects: [...effects, "No model is affected."], way: NO_WAY_BACK, confirm: `Delete ${bytes(plan.freed_bytes)}` };
    },
    run: async () => ({ done: `${bytes((await sent("gc", {})).freed_bytes)} were freed.` }),
  };
}

/** Takes back the newest change of names that the user has made, with whatever program. */
export function undo() {
  let change = null;
  return {
    title: "Undo your newest change of names", confirm: "Undo", reason: whyNot("pull"),
    preview: async () => {
      const planned = await sent("undo", { dry_run: true });
      change = planned.change;
      const effects = [`Takes back the ${planned.verb} of ${relative(planned.time)}.`, ...planned.names.map(takenBack)];
      const commands = planned.reversed_by.join(" && ");
      return { effects, way: commands ? `In a terminal, ${commands} brings the change again.` : NO_WAY_BACK };
    },
    // Refused if another change has been made since.
    run: async () => {
      const undone = await sent("undo", { change });
      return { done: `The ${undone.verb} is taken back.` };
    },
  };
}

/** What happens to a name of a change that is taken back. */
function takenBack({ name, digest, replaced, renamed_from: from, stored_as: other }) {
  if (!digest) return `${name} is removed; ${other ? `the model stays as ${other}` : "the model goes to the trash"}.`;
  if (from) return `${from} is called ${name} again.`;
  if (digest === replaced) return `${name} follows again what it followed before.`;
  return replaced ? `${name} means the model ${id(digest)} again, in place of ${id(replaced)}.` : `${name} is restored.`;
}
