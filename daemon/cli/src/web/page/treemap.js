// A treemap: areas that are as square as possible (Bruls, Huizing and van Wijk, "Squarified Treemaps").

const SVG = "http://www.w3.org/2000/svg";

// The width of a character of the labels, on average; fonts differ.
const CHARACTER = 7.5;

/** Divides a rectangle among values, the largest first; returns a rectangle for each. */
export function squarify(values, x, y, width, height) {
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

/** Shows parts, given as `{id, kind, label, size, detail, bytes}`, and tells `onDetail` which one is looked at. */
export class Treemap {
  #svg;
  #onDetail;
  #parts = [];
  #current = null;

  constructor(svg, onDetail) {
    this.#svg = svg;
    this.#onDetail = onDetail;
    new ResizeObserver(() => this.#draw()).observe(svg.parentElement);
    svg.addEventListener("keydown", (event) => this.#onKey(event));
  }

  show(parts) {
    this.#parts = [...parts].sort((a, b) => b.bytes - a.bytes);
    this.#draw();
  }

  #draw() {
    const width = this.#svg.parentElement.clientWidth;
    if (width === 0) return;
    const height = Math.round(Math.min(Math.max(width * 0.4, 240), 460));
    const hadFocus = this.#svg.contains(document.activeElement);
    this.#svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#svg.setAttribute("height", height);
    if (!this.#parts.some((part) => part.id === this.#current)) this.#current = this.#parts[0]?.id ?? null;
    const rectangles = squarify(this.#parts.map((part) => part.bytes), 0, 0, width, height);
    this.#svg.replaceChildren(...rectangles.map((rectangle, place) => this.#area(this.#parts[place], rectangle)));
    if (hadFocus) this.#focused()?.focus();
  }

  #area(part, { x, y, width, height }) {
    const group = element("g", { tabindex: part.id === this.#current ? 0 : -1, role: "img", "aria-label": part.detail });
    group.dataset.id = part.id;
    group.append(element("rect", { x, y, width, height, class: part.kind }));
    // Half a number would be a wrong one.
    const isWhole = part.size.length * CHARACTER <= width - 10;
    [fitting(part.label, width - 10), isWhole ? part.size : ""].forEach((label, place) => {
      if (!label || height < 20 + 16 * place) return;
      const text = element("text", { x: x + 5, y: y + 15 + 16 * place });
      text.textContent = label;
      group.append(text);
    });
    const title = element("title", {});
    title.textContent = part.detail;
    group.append(title);
    group.addEventListener("pointerenter", () => this.#onDetail(part.detail));
    group.addEventListener("focus", () => {
      this.#current = part.id;
      this.#onDetail(part.detail);
    });
    return group;
  }

  #focused() {
    return [...this.#svg.children].find((group) => group.dataset.id === this.#current);
  }

  #onKey(event) {
    const groups = [...this.#svg.children];
    const place = groups.findIndex((group) => group.dataset.id === this.#current);
    const steps = { ArrowRight: place + 1, ArrowDown: place + 1, ArrowLeft: place - 1, ArrowUp: place - 1, Home: 0, End: groups.length - 1 };
    const next = groups[steps[event.key]];
    if (!next) return;
    event.preventDefault();
    groups[place]?.setAttribute("tabindex", -1);
    next.setAttribute("tabindex", 0);
    next.focus();
  }
}

function element(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** As much of a text as fits a width, or nothing if that says little. */
function fitting(text, width) {
  const most = Math.floor(width / CHARACTER);
  if (text.length <= most) return text;
  return most >= 5 ? `${text.slice(0, most - 1)}…` : "";
}
