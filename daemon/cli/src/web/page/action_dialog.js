// The dialog of an action: says what it will do, does it when that is confirmed, and then says what was done and offers to
// take it back.

import { made } from "./tables.js";

const find = (id) => document.getElementById(id);

/** For so many milliseconds after an action, the page may be drawn anew because of it. */
const SETTLING = 5000;

/**
 * An action is `{title, confirm, preview(values), run(values), fields?, isAsking?, check?}`. `preview` gives `{effects, way,
 * confirm?}`: what will happen, how it can be taken back, and another text for the button. `run` gives `{done, back?}`: what
 * was done, and an action that takes it back. Both may fail with an `Error` whose message is shown. `fields` are
 * `{id, label, value?, type?, hint?}`; with `isAsking` the preview waits until the user has filled them and pressed a button
 * with the text `check`. `reason` says why the user may not do it: then nothing is done.
 */
export class ActionDialog {
  #dialog = find("action");
  #confirm = find("action-confirm");
  #close = find("action-close");
  #back = find("action-back");
  #action = null;
  /** `fill`, `ask`, `ready`, `stuck`, `run` or `done`. */
  #state = "stuck";
  #turn = 0;
  #taking = null;
  #opener = null;
  #closed = -Infinity;
  #onChange;

  /** `onChange` is called when an action has been done. */
  constructor(onChange) {
    this.#onChange = onChange;
    find("action-form").addEventListener("submit", (event) => { event.preventDefault(); this.#press(); });
    find("action-fields").addEventListener("input", () => this.#enter("fill"));
    this.#close.addEventListener("click", () => { if (this.#state !== "run") this.#dialog.close(); });
    this.#dialog.addEventListener("close", () => {
      this.#closed = Date.now();
      if (!this.#opener?.isConnected) this.#refocus();
    });
    this.#back.addEventListener("click", () => this.#run(this.#taking, {}));
    // What has begun ends; its result is told.
    this.#dialog.addEventListener("cancel", (event) => { if (this.#state === "run") event.preventDefault(); });
  }

  open(action) {
    this.#action = action;
    if (!this.#dialog.open) this.#opener = document.activeElement;
    find("action-title").textContent = action.title;
    find("action-fields").replaceChildren(...(action.fields ?? []).flatMap(field));
    this.#tell([], "");
    if (!this.#dialog.open) this.#dialog.showModal();
    const first = find("action-fields").querySelector("input");
    (first ?? this.#close).focus();
    if (action.reason) this.#enter("stuck", action.reason);
    else if (action.isAsking) this.#enter("fill");
    else this.#preview();
  }

  /** Called when the page has been drawn again: what had the focus after the dialog was closed may be gone. */
  settle() {
    if (Date.now() < this.#closed + SETTLING && document.activeElement === document.body) this.#refocus();
  }

  #refocus() {
    const place = document.querySelector("dialog[open]") ?? document;
    const again = place.querySelector(`[data-action="${CSS.escape(this.#opener?.dataset.action ?? "")}"]`);
    const seen = [again, ...place.querySelectorAll("button")].find((button) => button?.checkVisibility());
    seen?.focus();
  }

  #values() {
    return Object.fromEntries([...find("action-fields").querySelectorAll("input")].map((input) => [input.name, input.value.trim()]));
  }

  #press() {
    if (this.#confirm.getAttribute("aria-disabled") === "true") return;
    if (this.#state === "fill") this.#preview();
    else if (this.#state === "ready") this.#run(this.#action, this.#values());
  }

  async #preview() {
    this.#enter("ask");
    const turn = this.#turn;
    try {
      const { effects, way, confirm } = await this.#action.preview(this.#values());
      if (turn !== this.#turn) return;
      this.#enter("ready");
      this.#tell(effects, way);
      if (confirm) this.#confirm.textContent = confirm;
    } catch (error) {
      if (turn === this.#turn) this.#enter("stuck", error.message);
    }
  }

  async #run(action, values) {
    this.#enter("run");
    try {
      const { done, back } = await action.run(values);
      this.#enter("done");
      this.#tell([], "");
      find("action-fields").replaceChildren();
      find("action-done").textContent = done;
      this.#taking = back ?? null;
      this.#back.hidden = !back;
      this.#close.focus();
    } catch (error) {
      this.#enter("stuck", error.message);
    }
    this.#onChange();
  }

  /** Shows what is possible in a state; each entry makes an earlier preview void. */
  #enter(state, problem = "") {
    this.#state = state;
    this.#turn += 1;
    const waits = { ask: "Asking what it will do …", run: "Working …" }[state] ?? "";
    find("action-done").textContent = waits;
    find("action-problem").textContent = problem;
    find("action-problem").hidden = !problem;
    this.#confirm.textContent = state === "fill" ? this.#action.check ?? "Check" : this.#action.confirm;
    this.#confirm.setAttribute("aria-disabled", !["fill", "ready"].includes(state));
    this.#confirm.hidden = state === "done" || Boolean(this.#action.reason);
    this.#back.hidden = true;
    this.#close.textContent = ["done", "stuck"].includes(state) ? "Close" : "Cancel";
    this.#close.setAttribute("aria-disabled", state === "run");
    if (state !== "ready") this.#tell([], "");
  }

  #tell(effects, way) {
    find("action-effects").replaceChildren(...effects.map((effect) => made("li", effect)));
    find("action-way").textContent = way;
  }
}

function field({ id, label, value = "", type = "text", hint = "" }) {
  const input = document.createElement("input");
  Object.assign(input, { name: id, id: `action-${id}`, type, value, autocomplete: "off", spellcheck: false });
  if (type === "number") Object.assign(input, { min: "0", step: "any" });
  const title = made("label", [label, input]);
  if (!hint) return [title];
  const help = made("p", hint, "muted");
  help.id = `action-${id}-hint`;
  input.setAttribute("aria-describedby", help.id);
  return [title, help];
}

/** A button that begins the action `key`. With a `reason` why the user may not do it, it says that instead. */
export function actionButton(key, label, reason, begin) {
  const button = made("button", label);
  button.type = "button";
  button.dataset.action = key;
  if (reason) {
    button.setAttribute("aria-disabled", "true");
    button.title = reason;
  }
  button.addEventListener("click", begin);
  return button;
}

/** Replaces the buttons at a place, and keeps the focus on the action that has it. */
export function showButtons(place, buttons) {
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.action : null;
  place.replaceChildren(...buttons);
  buttons.find((button) => button.dataset.action === focused)?.focus();
}
