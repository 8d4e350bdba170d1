// Long tables can be sorted: a click on a heading, or Enter while it has the focus. Nothing is loaded.
const LONG = 12;

function value(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replace(/,/g, ""));
  return /^[−-]?[\d.,]+( ?±.*| ?%.*)?$/.test(text) ? number : text.toLowerCase();
}

function compared(a, b) {
  if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
  return typeof a === "number" ? -1 : 1; // words after numbers
}

function sort(table, heading, column) {
  const turned = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", turned === 1 ? "ascending" : "descending");
  const rows = [...table.tBodies[0].rows];
  rows.sort((one, other) => turned * compared(value(one, column), value(other, column)));
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll(".md-content table")) {
  if (!table.tHead || !table.tBodies.length || table.tBodies[0].rows.length < LONG) continue;
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    heading.tabIndex = 0;
    heading.style.cursor = "pointer";
    heading.title = "sort by this column";
    heading.addEventListener("click", () => sort(table, heading, column));
    heading.addEventListener("keydown", (event) => {
      if (event.key === "Enter") sort(table, heading, column);
    });
  });
}
