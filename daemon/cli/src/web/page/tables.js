// Tables. All text is set as text, never as HTML: names come from registries and files.

/**
 * A table of rows. A column is `{title, text(row), number?, short?, isWide?, optional?, sort?(row), cell?(row)}`: its text, or
 * nodes of its own; a wide one is not shown in narrow windows. Columns with `sort` have a button in their header; an optional one is left out if all its texts are dashes.
 */
export class Table {
  #body;
  #head;
  #columns;
  #shown = [];
  #empty;
  #most;
  #rows = [];
  #sorted;

  constructor(table, columns, { empty, sorted = null, most = Infinity } = {}) {
    this.#columns = columns;
    this.#empty = empty ?? "";
    this.#most = most;
    this.#sorted = sorted && { column: columns[sorted.column], descending: sorted.descending };
    this.#body = table.tBodies[0];
    this.#head = document.createElement("tr");
    table.tHead.replaceChildren(this.#head);
    this.#choose();
  }

  show(rows) {
    this.#rows = rows;
    this.#choose();
    this.#draw();
  }

  /** The rows in their order, as far as they are shown. */
  get visible() {
    return this.#order().slice(0, this.#most);
  }

  showAll() {
    this.#most = Infinity;
    this.#draw();
  }

  /** Draws the header again if other columns are shown now. */
  #choose() {
    const isShown = (column) => !column.optional || this.#rows.some((row) => column.text(row) !== "–");
    const shown = this.#columns.filter(isShown);
    if (shown.length === this.#shown.length && shown.every((column, place) => column === this.#shown[place])) return;
    this.#shown = shown;
    this.#head.replaceChildren(...shown.map((column) => this.#header(column)));
    this.#markSorted();
  }

  #header(column) {
    const header = document.createElement("th");
    header.scope = "col";
    header.className = classes(column);
    if (!column.sort) {
      header.textContent = column.title;
      return header;
    }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = column.title;
    button.addEventListener("click", () => {
      const isSame = this.#sorted?.column === column;
      this.#sorted = { column, descending: isSame ? !this.#sorted.descending : Boolean(column.number) };
      this.#markSorted();
      this.#draw();
    });
    header.append(button);
    return header;
  }

  #markSorted() {
    [...this.#head.cells].forEach((header, place) => {
      if (!this.#shown[place].sort) return;
      const isSorted = this.#sorted?.column === this.#shown[place];
      header.setAttribute("aria-sort", !isSorted ? "none" : this.#sorted.descending ? "descending" : "ascending");
    });
  }

  #draw() {
    const rows = this.visible;
    if (rows.length === 0) {
      const cell = document.createElement("td");
      cell.colSpan = this.#shown.length;
      cell.className = "muted";
      cell.textContent = this.#empty;
      const row = document.createElement("tr");
      row.append(cell);
      this.#body.replaceChildren(row);
      return;
    }
    const focused = this.#body.contains(document.activeElement) ? document.activeElement.dataset.row : undefined;
    this.#body.replaceChildren(...rows.map((row) => this.#row(row)));
    if (focused !== undefined) this.#body.querySelector(`[data-row="${CSS.escape(focused)}"]`)?.focus();
  }

  #order() {
    const sort = this.#sorted?.column.sort;
    if (!sort) return this.#rows;
    const sign = this.#sorted.descending ? -1 : 1;
    const keyed = this.#rows.map((row) => [sort(row), row]);
    keyed.sort(([a], [b]) => sign * (typeof a === "string" ? a.localeCompare(b) : a - b));
    return keyed.map(([, row]) => row);
  }

  #row(row) {
    const line = document.createElement("tr");
    for (const column of this.#shown) {
      const cell = document.createElement("td");
      cell.className = classes(column);
      const content = column.cell ? column.cell(row) : column.text(row);
      cell.append(...[content].flat());
      line.append(cell);
    }
    return line;
  }
}

function classes({ number, short, isWide }) {
  return [number && "number", short && "short", isWide && "wide"].filter(Boolean).join(" ");
}

/** A small mark beside a name. */
export function tag(text) {
  const mark = document.createElement("span");
  mark.className = "tag";
  mark.textContent = text;
  return mark;
}

export function progress(done, total, label) {
  const bar = document.createElement("progress");
  bar.setAttribute("aria-label", label);
  if (total) {
    bar.max = total;
    bar.value = Math.min(done, total);
  }
  return bar;
}

/** An element with a text or children. */
export function made(name, content, className = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...[content].flat());
  return element;
}
