// Where two models differ: a strip of their layers, by the kinds of tensors.

import { bytes, percent, plural } from "./format.js";
import { short } from "./families.js";
import { Roving, element } from "./roving.js";

const KINDS = [
  ["attention", /attn|attention|self_attn|\bssm|mixer/], ["experts", /exps|expert|gate_inp|shexp/],
  ["feed-forward", /ffn|mlp|feed_forward|\bfc\d|\bw[123]\b/], ["norms", /norm|\bln_/],
  ["embedding", /embd|embed|wte|^output\.|lm_head/], ["other", /./],
];
const LAYER = /(?:^|\.)(?:blk|layers|h|blocks?|layer|transformer_blocks)\.(\d+)\./;

/** What differs between two lists of tensors: per layer and kind of tensor the bytes that are the same and those that are not. */
export function compare(one, other) {
  const others = new Map(other.map((tensor) => [tensor.name, tensor]));
  const layers = new Map();
  const total = { same: 0, differs: 0, only: 0, tensors: 0, changed: 0 };
  const add = (tensor, field) => {
    const found = LAYER.exec(tensor.name);
    const layer = found ? Number(found[1]) : -1;
    // A norm of an attention is a norm.
    const kind = /norm/.test(tensor.name) ? "norms" : KINDS.find(([, pattern]) => pattern.test(tensor.name))[0];
    const entry = layers.get(layer) ?? { layer, kinds: new Map(), same: 0, differs: 0, only: 0, tensors: 0, changed: 0 };
    const sums = entry.kinds.get(kind) ?? { same: 0, differs: 0, only: 0 };
    for (const sum of [sums, entry, total]) sum[field] += tensor.size;
    for (const sum of [entry, total]) {
      sum.tensors += 1;
      if (field !== "same") sum.changed += 1;
    }
    entry.kinds.set(kind, sums);
    layers.set(layer, entry);
  };
  for (const tensor of one) {
    const twin = others.get(tensor.name);
    others.delete(tensor.name);
    if (!twin) add(tensor, "only");
    else add(tensor, twin.digest === tensor.digest && twin.offset === tensor.offset ? "same" : "differs");
  }
  for (const tensor of others.values()) add(tensor, "only");
  const sorted = [...layers.values()].sort((a, b) => (a.layer < 0 ? 1 : b.layer < 0 ? -1 : a.layer - b.layer));
  return { layers: sorted, total };
}

/** `Layers 3, 7–9 and the tensors outside of layers differ` */
function where(layers) {
  const changed = layers.filter((entry) => entry.changed > 0);
  const ranges = [];
  for (const { layer } of changed.filter((entry) => entry.layer >= 0)) {
    const last = ranges.at(-1);
    if (last && last[1] === layer - 1) last[1] = layer;
    else ranges.push([layer, layer]);
  }
  const shown = ranges.slice(0, 6).map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`));
  if (ranges.length > 6) shown.push(`${ranges.length - 6} more`);
  const texts = [];
  if (shown.length > 0) texts.push(`${shown.length === 1 && !shown[0].includes("–") ? "layer" : "layers"} ${shown.join(", ")}`);
  if (changed.some((entry) => entry.layer < 0)) texts.push("tensors outside of the layers");
  return texts.join(" and ");
}

export function summary({ layers, total }) {
  const whole = total.same + total.differs + total.only;
  if (whole === 0) return "These models have no tensors.";
  if (total.changed === 0) return `All ${plural(total.tensors, "tensor")} are the same, byte for byte.`;
  const same = `${bytes(total.same)} (${percent(total.same, whole)}) are the same, byte for byte, and stored once.`;
  return `${same} ${total.changed} of ${plural(total.tensors, "tensor")} differ, ${bytes(total.differs + total.only)}: in ${where(layers)}.`;
}

export class Layers {
  #svg;
  #roving;
  #compared = null;

  constructor(svg, onDetail) {
    this.#svg = svg;
    const tell = (item) => onDetail(item.getAttribute("aria-label"));
    this.#roving = new Roving(svg, tell, tell);
    new ResizeObserver(() => this.#draw()).observe(svg.parentElement);
  }

  show(compared) {
    this.#compared = compared;
    this.#draw();
  }

  #draw() {
    const width = this.#svg.parentElement.clientWidth;
    if (width === 0 || !this.#compared) return;
    const { layers } = this.#compared;
    const kinds = KINDS.map(([kind]) => kind).filter((kind) => layers.some((entry) => entry.kinds.has(kind)));
    const [left, row, gap] = [92, 26, 4];
    const step = Math.min(34, (width - left) / Math.max(layers.length, 1));
    const height = kinds.length * (row + gap) + 18;
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#svg.setAttribute("height", height);
    const made = kinds.map((kind, place) => element("text", { class: "label", x: 0, y: place * (row + gap) + 17 }, kind));
    const every = step >= 16 ? 1 : step >= 8 ? 4 : 10;
    layers.forEach((entry, place) => {
      const x = left + place * step;
      made.push(column(entry, kinds, x, step, row, gap));
      const isMarked = entry.layer >= 0 && entry.layer % every === 0 && !(step < 22 && entry.layer > 99 && every === 1);
      const label = entry.layer < 0 ? (step >= 22 ? "rest" : "") : isMarked ? entry.layer : "";
      if (label !== "") made.push(element("text", { class: "label", x: x + step / 2, y: height - 3, "text-anchor": "middle" }, label));
    });
    this.#roving.replace(made);
  }
}

/** One layer: in each row the part that is the same from below, and what differs above it. */
function column(entry, kinds, x, step, row, gap) {
  const name = entry.layer < 0 ? "outside of the layers" : `layer ${entry.layer}`;
  const whole = entry.same + entry.differs + entry.only;
  const detail = entry.changed === 0
    ? `${name}: all ${plural(entry.tensors, "tensor")} the same, ${bytes(entry.same)}`
    : `${name}: ${entry.changed} of ${plural(entry.tensors, "tensor")} differ, ${bytes(entry.differs + entry.only)} of ${bytes(whole)}`;
  const group = element("g", { tabindex: -1, role: "img", "aria-label": detail });
  group.dataset.id = `layer ${entry.layer}`;
  const width = Math.max(step - 1, 1);
  kinds.forEach((kind, place) => {
    const sums = entry.kinds.get(kind);
    if (!sums) return;
    const all = sums.same + sums.differs + sums.only;
    let y = place * (row + gap);
    for (const field of ["only", "differs", "same"]) {
      // A small difference must be seen.
      const share = all > 0 ? sums[field] / all : field === "same" ? 1 : 0;
      const height = share === 0 ? 0 : Math.min(Math.max(row * share, 3), y - place * (row + gap) > 0 ? place * (row + gap) + row - y : row);
      if (height > 0) group.append(element("rect", { class: field, x, y, width, height }));
      y += height;
    }
  });
  group.append(element("title", {}, detail));
  return group;
}
