// Tables in the page: rows are sorted by a click on the head of a column, and filtered by a text.

const NOT_NUMBER = /[,%]/g;

/** @param {Element | undefined} cell */
function keyOf(cell) {
  const text = (cell?.textContent ?? "").trim();
  if (!cell || cell.matches(".none")) return null;
  return cell.matches(".num") ? Number(text.replace(NOT_NUMBER, "")) : text;
}

/** @param {HTMLElement} button */
function sort(button) {
  const head = button.closest("th");
  const body = button.closest("table")?.tBodies[0];
  if (!head || !body) return;
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const other of head.parentElement?.children ?? []) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const column = Number(button.dataset.sort);
  const rows = [...body.rows].map((row) => ({ row, key: keyOf(row.querySelectorAll("td")[column]) }));
  const sign = order === "ascending" ? 1 : -1;
  rows.sort((one, other) => {
    // What is missing comes last, in either order.
    if (one.key === null || other.key === null) return Number(one.key === null) - Number(other.key === null);
    if (typeof one.key === "number" && typeof other.key === "number") return sign * (one.key - other.key);
    return sign * String(one.key).localeCompare(String(other.key));
  });
  body.append(...rows.map(({ row }) => row));
}

/** @param {HTMLInputElement} field */
function filter(field) {
  const wanted = field.value.trim().toLowerCase();
  const rows = field.closest(".block, .table-page")?.querySelectorAll(".data tbody tr") ?? [];
  for (const row of rows) {
    /** @type {HTMLElement} */ (row).hidden = !(row.textContent ?? "").toLowerCase().includes(wanted);
  }
}

export function startTables() {
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-sort]") : null;
    if (button instanceof HTMLElement) sort(button);
  });
  document.addEventListener("input", (event) => {
    if (event.target instanceof HTMLInputElement && event.target.matches("[data-filter]")) filter(event.target);
  });
}
