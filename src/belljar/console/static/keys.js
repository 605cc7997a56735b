// Keys for those who use no mouse. All can be switched off, and none works while one types.

const OFF = "belljar-keys-off";
const PAGES = /** @type {Record<string, string>} */ ({ s: "/console", i: "/console/inbox" });
const SEQUENCE_MS = 1500;

/** @param {number} step */
function moveCell(step) {
  const cells = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(".cell")]);
  const current = cells.findIndex((cell) => cell === document.activeElement || cell.contains(document.activeElement));
  const visible = cells.findIndex((cell) => cell.getBoundingClientRect().bottom > 60);
  const next = cells[Math.min(cells.length - 1, Math.max(0, current < 0 ? visible : current + step))];
  next?.focus();
  next?.scrollIntoView({ block: "start" });
}

function foldCell() {
  const cell = document.activeElement?.closest(".cell");
  const button = /** @type {HTMLElement | null} */ (cell?.querySelector(".unfold") ?? null);
  if (button) button.click();
  else cell?.classList.toggle("folded");
}

export function showHelp() {
  /** @type {HTMLDialogElement | null} */ (document.getElementById("keys"))?.showModal();
}

/** @type {Record<string, () => void>} */
const KEYS = {
  j: () => moveCell(1),
  k: () => moveCell(-1),
  o: foldCell,
  r: () => document.getElementById("code")?.focus(),
  ".": () => {
    const button = document.getElementById("interrupt");
    if (button?.checkVisibility()) button.click();
  },
  "/": () => document.getElementById("q")?.focus(),
  "?": showHelp,
};

export function startKeys() {
  const box = /** @type {HTMLInputElement | null} */ (document.getElementById("keys-on"));
  if (box) {
    box.checked = localStorage.getItem(OFF) === null;
    box.addEventListener("change", () => (box.checked ? localStorage.removeItem(OFF) : localStorage.setItem(OFF, "1")));
  }
  const help = document.getElementById("keys-help");
  if (help) {
    help.hidden = false;
    help.addEventListener("click", showHelp);
  }
  // `g` waits a moment for the letter of a page.
  let goneAt = Number.NEGATIVE_INFINITY;
  document.addEventListener("keydown", (event) => {
    const target = event.target instanceof HTMLElement ? event.target : null;
    const isTyping = target?.closest("input, textarea, select, [contenteditable], dialog[open]");
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey || localStorage.getItem(OFF) !== null) return;
    const page = performance.now() - goneAt < SEQUENCE_MS ? PAGES[event.key] : undefined;
    goneAt = event.key === "g" ? performance.now() : Number.NEGATIVE_INFINITY;
    const act = page ? () => location.assign(page) : KEYS[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
}
