// Keys for those who use no mouse. All can be switched off, and none works while one types.

const OFF = "belljar-keys-off";

/** @param {number} step */
function moveCell(step) {
  const cells = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".cell")]);
  const current = cells.findIndex((cell) => cell === document.activeElement || cell.contains(document.activeElement));
  const visible = cells.findIndex((cell) => cell.getBoundingClientRect().bottom > 60);
  const next = cells[Math.min(cells.length - 1, Math.max(0, current < 0 ? visible : current + step))];
  next?.focus();
  next?.scrollIntoView({ block: "start" });
}

/** @type {Record<string, () => void>} */
const KEYS = {
  j: () => moveCell(1),
  k: () => moveCell(-1),
  o: () => /** @type {HTMLElement | null} */ (document.activeElement?.closest(".cell")?.querySelector(".cell-head button"))?.click(),
  r: () => document.getElementById("code")?.focus(),
  ".": () => document.getElementById("interrupt")?.click(),
  "/": () => document.getElementById("q")?.focus(),
  s: () => location.assign("/console"),
  "?": () => /** @type {HTMLDialogElement | null} */ (document.getElementById("keys"))?.showModal(),
};

export function startKeys() {
  const box = /** @type {HTMLInputElement | null} */ (document.getElementById("keys-on"));
  if (box) {
    box.checked = localStorage.getItem(OFF) === null;
    box.addEventListener("change", () => (box.checked ? localStorage.removeItem(OFF) : localStorage.setItem(OFF, "1")));
  }
  const help = document.getElementById("keys-help");
  if (help && document.getElementById("keys")) {
    help.hidden = false;
    help.addEventListener("click", KEYS["?"]);
  }
  document.addEventListener("keydown", (event) => {
    const target = event.target instanceof HTMLElement ? event.target : null;
    const isTyping = target?.closest("input, textarea, select, [contenteditable]");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || localStorage.getItem(OFF) !== null) return;
    const act = KEYS[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
}
