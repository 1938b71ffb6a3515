"use strict";
// In a sortable table, columns that hold numbers only get a button in their header. Without scripts the page reads the same.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const number = (row) => Number(row.cells[column].dataset.value ?? NaN);
    const rows = [...body.rows];
    if (!rows.every((row) => "value" in row.cells[column].dataset)) return;
    head.classList.add("numbers");
    if (!table.classList.contains("sortable") || rows.length < 2) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.title = "Sort by this column";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const sign = descending ? -1 : 1;
      // What is not a number ("nan") goes last either way.
      const order = (a, b) => Number.isNaN(number(a)) - Number.isNaN(number(b)) || sign * (number(a) - number(b));
      body.append(...[...body.rows].sort(order));
    });
  });
}
