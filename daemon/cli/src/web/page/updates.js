// The models whose source has another version now, and the leases that can be ended.

import { actionButton, showButtons } from "./action_dialog.js";
import { checked, sent } from "./actions.js";
import { post } from "./connection.js";
import { names, plural, relative, user } from "./format.js";
import { update, updateAll, whyNotUpdate } from "./pulling.js";
import { whyNot, whyNotOf } from "./rights.js";
import { Table } from "./tables.js";

const find = (id) => document.getElementById(id);

const STATES = { outdated: "another version", unknown: "its source does not say", failed: "not compared" };

/** Compares models with their sources when it is asked to, and offers to pull the newer versions. */
export class Updates {
  #table;
  #dialog;
  #known;
  #models = [];
  #isAsking = false;

  /** `known` has the stored models. */
  constructor(dialog, known) {
    [this.#dialog, this.#known] = [dialog, known];
    this.#table = new Table(find("updates"), [
      { title: "Model", text: (model) => model.name },
      { title: "Set here", short: true, text: (model) => relative(model.modified) },
      { title: "At its source", text: (model) => model.error ?? STATES[model.status] },
      { title: "Source", text: (model) => model.source },
      { title: "Action", cell: (model) => model.status === "outdated" ? this.#button(model) : "–" },
    ]);
    find("updates-check").addEventListener("click", () => this.#ask());
  }

  /** Called when models have changed. A model that has been updated is not outdated any more. */
  note(models) {
    const digests = new Map(models.map((model) => [model.name, model.digest]));
    const left = this.#models.filter((model) => digests.get(model.name) === model.local);
    if (left.length !== this.#models.length) this.#show(left);
    const followed = models.filter((model) => model.follows && !model.store).length;
    find("updates-check").hidden = followed === 0;
    find("updates-check").setAttribute("aria-disabled", Boolean(whyNot("pull")));
    find("updates-check").title = whyNot("pull");
  }

  async #ask() {
    const reason = whyNot("pull");
    if (this.#isAsking || reason) {
      find("updates-text").textContent = reason || find("updates-text").textContent;
      return;
    }
    this.#isAsking = true;
    find("updates-text").textContent = "Asking the sources …";
    try {
      const { models } = checked(await post("/outdated", {}));
      this.#show(models);
    } catch (error) {
      find("updates-text").textContent = error.message;
    } finally {
      this.#isAsking = false;
    }
  }

  #show(models) {
    this.#models = models;
    const told = models.filter((model) => model.status !== "current");
    const outdated = models.filter((model) => model.status === "outdated").length;
    find("updates-text").textContent = `${plural(outdated, "model has", "models have")} another version at the source, of ${models.length} that can be compared.`;
    this.#table.show(told);
    find("updates-scroll").hidden = told.length === 0;
    const free = this.#free();
    const all = actionButton("update-all", `Update ${free.length} models …`, "", () => this.#dialog.open(updateAll(this.#free())));
    showButtons(find("updates-actions"), free.length > 1 ? [all] : []);
  }

  /** The outdated models that the user may update. */
  #free() {
    const outdated = this.#models.filter((model) => model.status === "outdated").map((model) => this.#current(model));
    return outdated.filter((model) => !whyNotUpdate(model));
  }

  /** The stored model, with the request that updates it. */
  #current(model) {
    const now = this.#known.models.find((other) => other.name === model.name) ?? model;
    return { ...now, request: model.request };
  }

  #button(model) {
    const action = () => update(this.#current(model), this.#known.models);
    const button = actionButton(`update ${model.name}`, "Update …", action().reason, () => this.#dialog.open(action()));
    button.setAttribute("aria-label", `Update ${model.name}`);
    button.dataset.row = button.dataset.action;
    return button;
  }
}

/** Ends the leases of a process, as `blobd release` does. `sessions` are all that are open. */
export function release(session, sessions) {
  const { pid } = session;
  const program = session.engine?.command ?? session.command ?? `process ${pid}`;
  const models = [...new Set(sessions.filter((other) => other.pid === pid).map((other) => other.model))];
  return {
    title: `Release what ${program} has open`, confirm: "Release",
    reason: pid > 0 ? whyNotOf(session) : "The daemon cannot see the number of its process; `blobd release MODEL` ends the leases of a model.",
    preview: () => ({
      effects: [
        `The leases of process ${pid} of ${user(session)} end: ${names(models, 4)}.`,
        "The program keeps the memory that it has mapped and is not stopped.",
        "The data of a model that was removed meanwhile is freed, as soon as it is not mapped any more.",
      ],
      way: "This cannot be taken back; the program can open the models again.",
    }),
    run: async () => {
      const { released } = await sent("release", { pid });
      return { done: `${plural(released.length, "lease")} of process ${pid} ended.` };
    },
  };
}
