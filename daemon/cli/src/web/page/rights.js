// What the user of the page may do. The daemon decides again when an action is sent.

import { ask, text } from "./connection.js";
import { user } from "./format.js";

/** Whether the page offers actions; that of `blobd web --read-only` does not. */
export const canAct = document.documentElement.dataset.mode !== "read-only";

let own = {};

export async function learnRights() {
  own = await ask("access");
}

/** Why the user may not do what needs this right; empty if it may. */
export function whyNot(right) {
  if (own.error) return text(own.error);
  if (!own.rights) return "The daemon has not said yet what you may do.";
  if (own.rights.includes(right)) return "";
  const found = own.rights.length > 0 ? own.rights.join(", ") : "no right";
  return `This needs the right “${right}” (access.${right} in the configuration); ${user(own)} has: ${found}.`;
}

/** Why the user may not change what a name means; empty if it may. `added_by` is the user who has added it. */
export function whyNotName({ added_by: adder, store }) {
  if (store) return `The model is in a lower store, ${store}, which this store only reads.`;
  const reason = whyNot("pull");
  if (reason || own.rights.includes("admin") || adder === own.uid) return reason;
  if (adder === undefined) return "It is not recorded who has added this name, so only administrators may change it.";
  return `uid ${adder} has added this name: only that user and administrators may change it.`;
}

/** Why the user may not end what this process has open; empty if it may. */
export function whyNotOf(session) {
  if (!own.rights || own.rights.includes("admin") || session.uid === own.uid) return whyNot("read");
  return `The process belongs to ${user(session)}: only that user and administrators may release it.`;
}
