// A treemap: areas that are as square as possible (Bruls, Huizing and van Wijk, "Squarified Treemaps").

import { Roving, element, fitting } from "./roving.js";

/** Divides a rectangle among values, the largest first; returns a rectangle for each. */
export function squarify(values, { x, y, width, height }) {
  const total = values.reduce((sum, value) => sum + value, 0);
  if (!(total > 0)) return [];
  const scale = (width * height) / total;
  const areas = values.map((value) => value * scale);
  const rectangles = [];
  let place = 0;
  while (place < areas.length) {
    const side = Math.min(width, height);
    let end = place + 1;
    let sum = areas[place];
    while (end < areas.length && worst(areas, place, end + 1, sum + areas[end], side) <= worst(areas, place, end, sum, side)) {
      sum += areas[end];
      end += 1;
    }
    const isTall = width >= height;
    const thickness = side > 0 ? sum / side : 0;
    let offset = 0;
    for (; place < end; place += 1) {
      const length = thickness > 0 ? areas[place] / thickness : 0;
      rectangles.push(isTall
        ? { x, y: y + offset, width: thickness, height: length }
        : { x: x + offset, y, width: length, height: thickness });
      offset += length;
    }
    if (isTall) {
      x += thickness;
      width = Math.max(width - thickness, 0);
    } else {
      y += thickness;
      height = Math.max(height - thickness, 0);
    }
  }
  return rectangles;
}

/** The greatest ratio of sides in a row of the areas from `first` to `end`. Areas are in descending order. */
function worst(areas, first, end, sum, side) {
  const squared = (side * side) / (sum * sum);
  return Math.max(squared * areas[first], 1 / (squared * areas[end - 1]));
}

const GAP = 2;
const HEADER = 18;

/**
 * Shows groups of parts, `{id, label, parts: [{id, kind, label, size, detail, bytes, model?}]}`. `onDetail` gets the detail of
 * the part that is looked at, `onOpen` the model of one that is activated.
 */
export class Treemap {
  #svg;
  #roving;
  #groups = [];
  #parts = new Map();

  constructor(svg, onDetail, onOpen) {
    this.#svg = svg;
    const part = (item) => this.#parts.get(item.dataset.id);
    this.#roving = new Roving(svg, (item) => onDetail(part(item).detail), (item) => {
      if (part(item).model) onOpen(part(item).model);
    });
    new ResizeObserver(() => this.#draw()).observe(svg.parentElement);
  }

  show(groups) {
    const size = (group) => group.parts.reduce((sum, part) => sum + part.bytes, 0);
    const sorted = groups.map((group) => ({ ...group, bytes: size(group), parts: [...group.parts].sort(bySize) }));
    this.#groups = sorted.filter((group) => group.bytes > 0).sort(bySize);
    this.#parts = new Map(sorted.flatMap((group) => group.parts).map((part) => [part.id, part]));
    this.#draw();
  }

  #draw() {
    const width = this.#svg.parentElement.clientWidth;
    if (width === 0) return;
    const height = Math.round(Math.min(Math.max(width * 0.4, 260), 460));
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#svg.setAttribute("height", height);
    const boxes = squarify(this.#groups.map((group) => group.bytes), { x: 0, y: 0, width, height });
    this.#roving.replace(boxes.flatMap((box, place) => this.#box(this.#groups[place], box)));
  }

  /** A family: its name above its parts, if there is room for it. */
  #box(group, { x, y, width, height }) {
    if (group.parts.length === 1) return [area(group.parts[0], { x, y, width, height })];
    const inner = { x: x + GAP, y: y + GAP, width: Math.max(width - 2 * GAP, 1), height: Math.max(height - 2 * GAP, 1) };
    const label = inner.height > 60 && inner.width > 50 ? fitting(group.label, inner.width - 6) : "";
    const made = [];
    if (label) {
      const title = element("g", { class: "family" });
      title.append(element("text", { x: inner.x + 3, y: inner.y + 13 }, label));
      made.push(title);
      inner.y += HEADER;
      inner.height -= HEADER;
    }
    const rectangles = squarify(group.parts.map((part) => part.bytes), inner);
    return made.concat(rectangles.map((rectangle, place) => area(group.parts[place], rectangle)));
  }
}

function area(part, { x, y, width, height }) {
  const group = element("g", { tabindex: -1, role: "img", "aria-label": part.detail });
  group.dataset.id = part.id;
  group.append(element("rect", { x, y, width, height, class: part.kind }));
  // Half a number would be a wrong one.
  const size = fitting(part.size, width - 10) === part.size ? part.size : "";
  [fitting(part.label, width - 10), size].forEach((label, place) => {
    if (label && height >= 20 + 16 * place) group.append(element("text", { x: x + 5, y: y + 15 + 16 * place }, label));
  });
  group.append(element("title", {}, part.detail));
  return group;
}

const bySize = (a, b) => b.bytes - a.bytes;
