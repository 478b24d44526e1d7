// Tables. All text is set as text, never as HTML: names come from registries and files.

/**
 * A table of rows. A column is `{title, text(row), number?, short?, sort?(row), cell?(row)}`: its text, or a node of its own.
 * Columns with `sort` have a button in their header.
 */
export class Table {
  #body;
  #head;
  #columns;
  #empty;
  #rows = [];
  #sorted;

  constructor(table, columns, { empty, sorted = null } = {}) {
    this.#columns = columns;
    this.#empty = empty ?? "";
    this.#sorted = sorted;
    this.#body = table.tBodies[0];
    this.#head = document.createElement("tr");
    this.#head.append(...columns.map((column, place) => this.#header(column, place)));
    table.tHead.replaceChildren(this.#head);
    this.#markSorted();
  }

  show(rows) {
    this.#rows = rows;
    this.#draw();
  }

  #header(column, place) {
    const header = document.createElement("th");
    header.scope = "col";
    if (column.number) header.className = "number";
    if (!column.sort) {
      header.textContent = column.title;
      return header;
    }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = column.title;
    button.addEventListener("click", () => {
      const isSame = this.#sorted?.column === place;
      this.#sorted = { column: place, descending: isSame ? !this.#sorted.descending : Boolean(column.number) };
      this.#markSorted();
      this.#draw();
    });
    header.append(button);
    return header;
  }

  #markSorted() {
    [...this.#head.cells].forEach((header, place) => {
      if (!this.#columns[place].sort) return;
      const isSorted = this.#sorted?.column === place;
      header.setAttribute("aria-sort", !isSorted ? "none" : this.#sorted.descending ? "descending" : "ascending");
    });
  }

  #draw() {
    const rows = this.#order();
    if (rows.length === 0) {
      const cell = document.createElement("td");
      cell.colSpan = this.#columns.length;
      cell.className = "muted";
      cell.textContent = this.#empty;
      const row = document.createElement("tr");
      row.append(cell);
      this.#body.replaceChildren(row);
      return;
    }
    this.#body.replaceChildren(...rows.map((row) => this.#row(row)));
  }

  #order() {
    const sort = this.#columns[this.#sorted?.column]?.sort;
    if (!sort) return this.#rows;
    const sign = this.#sorted.descending ? -1 : 1;
    const keyed = this.#rows.map((row) => [sort(row), row]);
    keyed.sort(([a], [b]) => sign * (typeof a === "string" ? a.localeCompare(b) : a - b));
    return keyed.map(([, row]) => row);
  }

  #row(row) {
    const line = document.createElement("tr");
    for (const column of this.#columns) {
      const cell = document.createElement("td");
      if (column.number) cell.className = "number";
      if (column.short) cell.className = "short";
      const content = column.cell ? column.cell(row) : column.text(row);
      cell.append(...[content].flat());
      line.append(cell);
    }
    return line;
  }
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
