// A matrix model × model: how many bytes each two share.

import { bytes, percent } from "./format.js";
import { short } from "./families.js";
import { Roving, element, fitting } from "./roving.js";

/** More would be too small to see. */
const MOST = 32;

export class Matrix {
  #svg;
  #note;
  #roving;
  #models = [];
  #shown = "";

  /** `onDetail` gets a text, `onPair` the names of two models that were chosen. */
  constructor(svg, note, onDetail, onPair) {
    [this.#svg, this.#note] = [svg, note];
    this.#roving = new Roving(svg, (item) => onDetail(item.getAttribute("aria-label")), (item) => {
      const [row, column] = item.dataset.id.split(" ").map(Number);
      onPair(this.#models[row].name, this.#models[column].name);
    });
    new ResizeObserver(() => this.#draw()).observe(svg.parentElement.parentElement);
  }

  /** Shows the models that share something, in the order of their families. Returns whether there are any. */
  show(groups) {
    const sharing = groups.flatMap((group) => group.models).filter((model) => [...model.shares.values()].some((shared) => shared > 0));
    const names = new Set(sharing.map((model) => model.name));
    let chosen = sharing.filter((model) => [...model.shares.keys()].some((name) => names.has(name)));
    if (chosen.length > MOST) {
      const most = (model) => Math.max(...model.shares.values());
      const largest = new Set([...chosen].sort((a, b) => most(b) - most(a)).slice(0, MOST));
      chosen = chosen.filter((model) => largest.has(model));
    }
    this.#note.textContent = chosen.length < sharing.length ? `The ${chosen.length} of ${sharing.length} models that share the most.` : "";
    this.#models = chosen;
    const state = JSON.stringify(chosen.map((model) => [model.name, model.total, [...model.shares]]));
    if (state !== this.#shown) this.#draw();
    this.#shown = state;
    return chosen.length > 1;
  }

  #draw() {
    const width = this.#svg.parentElement.parentElement.clientWidth;
    const count = this.#models.length;
    if (width === 0 || count < 2) return;
    const labels = Math.min(width * 0.42, 280);
    const cell = Math.max(13, Math.min(40, Math.floor((width - labels) / count)));
    const top = 20;
    const [fullWidth, height] = [labels + cell * count, top + cell * count];
    this.#svg.setAttribute("viewBox", `0 0 ${fullWidth} ${height}`);
    this.#svg.setAttribute("width", fullWidth);
    this.#svg.setAttribute("height", height);
    const made = [];
    this.#models.forEach((model, row) => {
      const y = top + row * cell;
      const label = fitting(`${row + 1} ${short(model.name)}`, labels - 10);
      const small = cell < 14 ? " small" : "";
      made.push(element("text", { class: `label${small}`, x: labels - 6, y: y + cell / 2 + 4, "text-anchor": "end" }, label));
      if (cell >= 18 || row % 5 === 4 || row === 0) {
        made.push(element("text", { class: `label${small}`, x: labels + row * cell + cell / 2, y: 13, "text-anchor": "middle" }, row + 1));
      }
      this.#models.forEach((other, column) => made.push(this.#cell(row, column, labels + column * cell, y, cell)));
    });
    this.#roving.replace(made);
  }

  #cell(row, column, x, y, cell) {
    const [model, other] = [this.#models[row], this.#models[column]];
    const size = cell - 1;
    if (row === column) return element("rect", { class: "self", x, y, width: size, height: size });
    const shared = model.shares.get(other.name) ?? 0;
    if (shared === 0) return element("rect", { class: "none", x, y, width: size, height: size });
    const whole = Math.min(model.total, other.total);
    const detail = `${short(model.name)} and ${short(other.name)} share ${bytes(shared)}, ${percent(shared, whole)} of the smaller one`;
    const group = element("g", { tabindex: -1, role: "button", "aria-label": detail });
    group.dataset.id = `${row} ${column}`;
    const strength = Math.min(1, shared / Math.max(whole, 1));
    group.append(element("rect", { class: "shared", x, y, width: size, height: size, "fill-opacity": (0.15 + 0.85 * strength).toFixed(3) }));
    group.append(element("title", {}, detail));
    return group;
  }
}
