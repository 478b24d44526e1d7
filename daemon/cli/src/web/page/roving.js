// Keyboard in a picture: one stop for Tab, arrows to the nearest neighbour in that direction, Enter to activate.

const DIRECTIONS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

export class Roving {
  #svg;
  #onFocus;
  #onActivate;
  #current = null;

  /** The items are groups with `data-id`; `onFocus` and `onActivate` get such a group. */
  constructor(svg, onFocus, onActivate) {
    [this.#svg, this.#onFocus, this.#onActivate] = [svg, onFocus, onActivate];
    svg.addEventListener("keydown", (event) => this.#onKey(event));
    svg.addEventListener("focusin", (event) => this.#look(event.target, true));
    svg.addEventListener("pointerover", (event) => this.#look(event.target, false));
    svg.addEventListener("click", (event) => {
      const item = event.target.closest?.("[data-id]");
      if (item) this.#onActivate(item);
    });
  }

  /** Replaces the content of the picture, and keeps the focus where it was. */
  replace(children) {
    const hadFocus = this.#svg.contains(document.activeElement);
    this.#svg.replaceChildren(...children);
    const items = this.#items();
    const current = items.find((item) => item.dataset.id === this.#current) ?? items[0];
    items.forEach((item) => item.setAttribute("tabindex", item === current ? 0 : -1));
    this.#current = current?.dataset.id ?? null;
    if (hadFocus) current?.focus();
  }

  #items() {
    return [...this.#svg.querySelectorAll("[data-id]")];
  }

  #look(target, isFocus) {
    const item = target.closest?.("[data-id]");
    if (!item) return;
    if (isFocus) this.#move(item);
    this.#onFocus(item);
  }

  #move(item) {
    for (const other of this.#items()) other.setAttribute("tabindex", other === item ? 0 : -1);
    this.#current = item.dataset.id;
  }

  #onKey(event) {
    const items = this.#items();
    const from = items.find((item) => item.dataset.id === this.#current);
    if (!from) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.#onActivate(from);
      return;
    }
    const direction = DIRECTIONS[event.key];
    const ends = { Home: items[0], End: items.at(-1) };
    const next = direction ? nearest(from, items, direction) : ends[event.key];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}

/** The nearest item in a direction; what is aside counts as further away. */
function nearest(from, items, [right, down]) {
  const start = centre(from);
  let best = null;
  let least = Infinity;
  for (const item of items) {
    if (item === from) continue;
    const { x, y } = centre(item);
    const along = (x - start.x) * right + (y - start.y) * down;
    const aside = Math.abs((x - start.x) * down) + Math.abs((y - start.y) * right);
    if (along > 1 && along + 2 * aside < least) [best, least] = [item, along + 2 * aside];
  }
  return best;
}

function centre(item) {
  const { x, y, width, height } = item.getBoundingClientRect();
  return { x: x + width / 2, y: y + height / 2 };
}

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The width of a character of the labels, on average; fonts differ.
const CHARACTER = 7.6;

/** As much of a text as fits a width, cut in the middle because names differ at both ends; nothing if that says little. */
export function fitting(text, width) {
  const most = Math.floor(width / CHARACTER);
  if (text.length <= most) return text;
  if (most < 8) return "";
  const start = Math.ceil((most - 1) / 2);
  return `${text.slice(0, start)}…${text.slice(text.length - (most - 1 - start))}`;
}
