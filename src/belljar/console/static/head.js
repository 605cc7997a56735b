// The head of a session's pages: how far a rewind goes, and the tools of a cell.

const SHOWN_STATES = 8;
const LINE_CHARS = 60;

/** The cells that a rewind to before this one undoes, itself among them. @param {Element} cell */
function undoneWith(cell) {
  const cells = [...document.querySelectorAll(".cell:not(.undone)")];
  return cells.slice(cells.indexOf(cell));
}

/** @param {Element} cell */
function numberOf(cell) {
  return cell.querySelector(".number")?.textContent ?? "";
}

/** @param {Element} cell */
function undoes(cell) {
  const count = undoneWith(cell).length - 1;
  if (count < 1) return `Undoes ${numberOf(cell)}, the last cell.`;
  return `Undoes ${numberOf(cell)} and the ${count === 1 ? "cell" : `${count} cells`} after it.`;
}

/** @param {HTMLElement} panel */
function fillRewinds(panel) {
  const forms = [...document.querySelectorAll(".cell .cell-acts form[action$='/rewind']")].reverse();
  const entries = forms.slice(0, SHOWN_STATES).map((form) => {
    const cell = /** @type {Element} */ (form.closest(".cell"));
    const line = (cell.querySelector(".code")?.textContent ?? "").trim().split("\n")[0].slice(0, LINE_CHARS);
    const button = document.createElement("button");
    button.type = "button";
    button.className = "choice";
    const code = document.createElement("code");
    code.textContent = line;
    const words = document.createElement("span");
    words.className = "hint";
    words.textContent = undoes(cell);
    button.append(`Before ${numberOf(cell)} `, code, words);
    button.addEventListener("click", () => /** @type {HTMLFormElement} */ (form).requestSubmit());
    return button;
  });
  const note = document.createElement("p");
  note.className = "hint";
  note.textContent = entries.length
    ? "Variables and files will be as they were then. What cells did elsewhere stays done."
    : "No earlier state is held: states are kept of the last cells, while the session is awake.";
  panel.replaceChildren(...entries, note);
}

export function startHead() {
  document.addEventListener(
    "beforetoggle",
    (event) => {
      const panel = event.target;
      if (!(panel instanceof HTMLElement)) return;
      if (panel.id === "rewind-panel") fillRewinds(panel);
      const cell = panel.closest(".cell");
      const words = panel.querySelector(".undoes");
      if (cell && words) words.textContent = undoes(cell);
    },
    true,
  );
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-copy], [data-edit]") : null;
    const code = button?.closest(".cell")?.querySelector(".code")?.textContent?.replace(/^\n/, "") ?? "";
    if (!(button instanceof HTMLElement)) return;
    if ("copy" in button.dataset) void copy(button, code);
    else edit(code);
  });
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-unclip]") : null;
    if (button instanceof HTMLElement) unfold(button);
  });
  // On a phone the tabs are wider than the screen.
  document.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  // What was done is said once, and not again when the page is loaded again.
  const here = new URL(location.href);
  if (here.searchParams.has("done")) {
    here.searchParams.delete("done");
    history.replaceState(null, "", here);
  }
}

/** Show all of a text, or its beginning again. @param {HTMLElement} button */
function unfold(button) {
  const text = /** @type {HTMLElement} */ (button.parentElement);
  const isFolded = text.classList.toggle("clipped");
  // A long text is in several elements, of which only the first was shown.
  for (let next = text.nextElementSibling; next?.matches(".hidden"); next = next.nextElementSibling)
    next.classList.toggle("clipped", isFolded);
  button.textContent = isFolded ? (button.dataset.unclip ?? "") : "Show less";
  button.setAttribute("aria-expanded", String(!isFolded));
  if (isFolded) text.scrollIntoView({ block: "nearest" });
}

/**
 * @param {HTMLElement} button
 * @param {string} code
 */
async function copy(button, code) {
  try {
    await navigator.clipboard.writeText(code);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** @param {string} code */
function edit(code) {
  const place = /** @type {HTMLTextAreaElement | null} */ (document.getElementById("code"));
  if (!place) return;
  place.value = code;
  place.dispatchEvent(new Event("input", { bubbles: true }));
  place.focus();
  place.scrollIntoView({ block: "center" });
}
