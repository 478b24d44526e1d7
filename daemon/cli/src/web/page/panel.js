// The panel of one model: what it is, the memory it needs, commands, and what it shares with whom.

import { showButtons } from "./action_dialog.js";
import { ask } from "./connection.js";
import { short } from "./families.js";
import { bytes, count, id, percent, relative } from "./format.js";
import { made } from "./tables.js";

const find = (id) => document.getElementById(id);

/** A question about one model. Its name has no character that paths do not have. */
export const about = (route, name) => `${route}/${name}`;

export class Panel {
  #dialog = find("panel");
  #name = null;
  #onCompare;
  #actionsFor;

  /**
   * `onCompare` gets the names of two models whose layers are to be shown; `actionsFor` gives the buttons of a model's
   * actions.
   */
  constructor(onCompare, actionsFor) {
    [this.#onCompare, this.#actionsFor] = [onCompare, actionsFor];
    find("panel-close").addEventListener("click", () => this.#dialog.close());
    this.#dialog.addEventListener("click", (event) => { if (event.target === this.#dialog) this.#dialog.close(); });
  }

  /** Opens the panel with what is known of the model, and asks for the rest. */
  async open(model, facts) {
    this.#name = model.name;
    find("panel-title").textContent = model.name;
    this.#facts(model, facts);
    this.#actions(model);
    find("panel-fit").textContent = "";
    find("panel-commands").replaceChildren(...commands(model).map(([what, command]) => commandLine(what, command)));
    const shares = model.shared_with ?? [];
    find("panel-shares").replaceChildren(...shares.slice(0, 20).map((other) => this.#share(model, other)));
    find("panel-shares-title").hidden = shares.length === 0;
    if (!this.#dialog.open) this.#dialog.showModal();
    this.#dialog.scrollTop = 0;
    const fit = await ask(about("fit", model.name));
    if (this.#name === model.name) find("panel-fit").replaceChildren(...fitText(fit));
  }

  /** Shows what has changed since it was opened. A model that is gone has no panel. */
  update(models, factOf) {
    if (!this.#dialog.open) return;
    const model = models.find((other) => other.name === this.#name);
    if (!model) {
      this.#dialog.close();
      return;
    }
    this.#facts(model, factOf(model));
    this.#actions(model);
  }

  #actions(model) {
    const buttons = this.#actionsFor(model);
    showButtons(find("panel-actions"), buttons);
    find("panel-why").textContent = [...new Set(buttons.map((button) => button.title))].join(" ");
  }

  #facts(model, facts) {
    const inStore = (model.unique_bytes ?? 0) + (model.shared_bytes ?? 0);
    const rows = [
      ["Architecture", facts?.architecture], ["Quantization", facts?.quantization],
      ["Parameters", facts?.parameters ? count(facts.parameters) : undefined],
      ["Kind", model.kind && model.kind !== "model" ? model.kind : undefined],
      ["As files", bytes(model.size)],
      ["On disk", model.unique_bytes === undefined ? undefined : `${bytes(inStore)}, of which ${bytes(model.shared_bytes)} are shared`],
      ["Freed by removing it", model.unique_bytes === undefined ? undefined : bytes(model.unique_bytes)],
      ["From", model.origin], ["In the store", model.store], ["Damaged", model.damage],
      ["Last opened", model.last_opened ? relative(model.last_opened) : undefined],
      ["Added", relative(model.modified)], ["Pinned", model.pinned ? "yes: neither removed nor evicted" : undefined],
      ["ID", id(model.digest)],
    ];
    const shown = rows.filter(([, value]) => value);
    find("panel-facts").replaceChildren(...shown.map(([title, value]) => made("div", [made("dt", title), made("dd", value)])));
  }

  #share(model, other) {
    const button = made("button", "Compare layers");
    button.type = "button";
    button.setAttribute("aria-label", `Compare layers with ${other.name}`);
    button.addEventListener("click", () => {
      this.#dialog.close();
      this.#onCompare(model.name, other.name);
    });
    const whole = (model.unique_bytes ?? 0) + (model.shared_bytes ?? 0);
    return made("li", [made("span", `${short(other.name)}: ${bytes(other.bytes)} (${percent(other.bytes, whole)})`), button]);
  }
}

function commands({ name, pinned }) {
  return [
    ["run an engine on it", `blobd exec -- llama-cli -m /blobd/${name}.gguf`], ["details", `blobd show ${name}`],
    ["memory for a context", `blobd fit ${name} --ctx 32768`], ["the original file", `blobd export ${name}`],
    pinned ? ["allow removal", `blobd unpin ${name}`] : ["keep it", `blobd pin ${name}`],
    ["remove it, with a week to change your mind", `blobd rm --keep 7d ${name}`],
  ];
}

function commandLine(what, command) {
  const button = made("button", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", `Copy: ${command}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousSibling);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return made("li", [made("span", what, "muted"), made("code", command), button]);
}

/** `Weights 4.30 GiB, KV cache 512 MiB at a context of 4096, graph 164 MiB: 4.96 GiB in all.` */
function fitText(fit) {
  if (fit.error) return [];
  const parts = [
    [fit.weights_bytes, "weights"], [fit.vision_weights_bytes, "projector"],
    [fit.kv_total_bytes, `KV cache at a context of ${fit.context}`], [fit.graph_full_bytes, "graph"],
  ].filter(([size]) => size > 0);
  const all = fit.required_bytes ?? fit.total_bytes;
  const sum = all ? `${bytes(all)} in all: ` : "";
  const texts = parts.map(([size, what]) => `${bytes(size)} ${what}`);
  if (texts.length === 0) return [];
  // What is missing for an estimate, if it is: `weights only: …`.
  const basis = fit.basis.startsWith("weights only") ? fit.basis.replaceAll("`", "") : `by the formulas of ${fit.basis}`;
  return [`Memory, ${basis}: ${sum}${texts.join(", ")}. `, made("code", "blobd fit"), " compares this with the GPUs of this machine."];
}
