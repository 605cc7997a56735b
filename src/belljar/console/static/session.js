// One session as a notebook that grows while its cells run.
import { loadBlocks, loadWhole } from "./blocks.js";
import { startComposing } from "./compose.js";
import { startFigures } from "./figures.js";
import { listenToFrames, showFrames } from "./frames.js";
import { addText, append, parsed, replace } from "./patch.js";
import { openStream } from "./stream.js";

/** @typedef {import("./stream.js").Change} Change */

const cells = /** @type {HTMLElement} */ (document.getElementById("cells"));
const followButton = /** @type {HTMLButtonElement} */ (document.getElementById("follow"));
const catchUpButton = /** @type {HTMLButtonElement} */ (document.getElementById("catch-up"));
const head = /** @type {HTMLElement | null} */ (document.querySelector(".session-head"));
const NEAR_END = 120;
const GAP = 6;

// Following the end, while frames and pictures grow too, until a person scrolls up

let isFollowing = !location.hash;
let followedHeight = 0;
/** @type {Change[] | null} */
let held = null;

// The end of the cells, above the form that runs one.
function isAtEnd() {
  return cells.getBoundingClientRect().bottom <= innerHeight + NEAR_END;
}

/** @param {boolean} follows */
function setFollowing(follows) {
  isFollowing = follows;
  followButton.hidden = follows;
}

function scrollToEnd() {
  followedHeight = cells.offsetHeight;
  const beyond = cells.getBoundingClientRect().bottom - innerHeight;
  // Some of the form below is shown too, but the head of the page covers nothing of the last cell for it.
  const covered = head ? head.offsetHeight + Number.parseFloat(getComputedStyle(head).top) : 0;
  const above = (cells.lastElementChild?.getBoundingClientRect().top ?? 0) - covered - GAP;
  const surplus = beyond > above ? beyond + NEAR_END : Math.min(beyond + NEAR_END, above);
  if (surplus > 0) scrollBy(0, surplus);
}

// What has just grown moves the end away from where a person looks, which is no wish of theirs to look elsewhere.
addEventListener(
  "scroll",
  () => {
    const hasGrown = cells.offsetHeight !== followedHeight;
    if (!isFollowing || !hasGrown) setFollowing(isAtEnd());
  },
  { passive: true },
);
followButton.addEventListener("click", () => {
  setFollowing(true);
  scrollToEnd();
});
new ResizeObserver(() => {
  if (isFollowing) scrollToEnd();
}).observe(cells);

// Held still, the page counts what it holds back

document.getElementById("hold")?.addEventListener("click", () => {
  held ??= [];
  showHeld();
});
catchUpButton.addEventListener("click", () => {
  const waiting = held ?? [];
  held = null;
  for (const change of waiting) apply(change);
  showHeld();
});

function showHeld() {
  catchUpButton.hidden = !held;
  catchUpButton.textContent = `Held still: show ${held?.length ?? 0} changes`;
}

/** @param {Change} change */
function receive(change) {
  if (held) {
    held.push(change);
    showHeld();
    return;
  }
  apply(change);
}

/** @param {Change} change */
function apply(change) {
  const html = change.html ?? "";
  switch (change.do) {
    case "cell":
      addCell(change.target, html);
      showLastError();
      break;
    case "append":
      append(change.target, html);
      showFrames(cells);
      break;
    case "replace":
      if (change.ended && document.querySelector(`#head-${change.target.slice(5)}[data-running]`))
        announce(change.ended);
      replace(change.target, html);
      showFrames(cells);
      addUnfoldButtons(); // a cell may be undone before its end is told
      showLastError();
      if (change.target === "session-state") showName();
      break;
    case "text":
      addText(change.target, change.text ?? "");
      break;
    case "empty":
      document.getElementById(change.target)?.replaceChildren();
      break;
    case "update":
      updateDisplays(change.target, html);
      break;
    case "tail":
      append(change.outputs ?? "", html);
      break;
    case "undone":
      for (const id of change.ids ?? []) document.getElementById(id)?.classList.add("undone");
      addUnfoldButtons();
      showLastError();
      break;
    case "rewindable":
      offerWayBack(change.parts ?? {});
      break;
    case "reload":
      location.reload();
      break;
    case "gone":
      announce("The session has ended");
      break;
  }
}

/**
 * @param {string} id
 * @param {string} html
 */
function addCell(id, html) {
  document.getElementById("empty")?.remove();
  if (document.getElementById(id)) replace(id, html);
  else cells.append(...parsed(html));
  showFrames(cells);
}

// The latest cell that failed, as far as cells are loaded; what was undone counts no more.
function showLastError() {
  const link = /** @type {HTMLAnchorElement | null} */ (document.getElementById("last-error"));
  const failed = [
    ...cells.querySelectorAll(
      ".cell:not(.undone) > .cell-head :is(.status-error, .status-timeout, .status-out_of_memory, .status-died)",
    ),
  ]
    .at(-1)
    ?.closest(".cell");
  if (!link) return;
  link.hidden = !failed;
  if (!failed) return;
  const raised = failed.querySelector(".error .raised")?.textContent?.trim().split("\n")[0] ?? "";
  link.href = `#${failed.id}`;
  link.textContent = `Last error: ${failed.querySelector(".number")?.textContent ?? ""} ${raised.slice(0, 300)}`;
}

// In the heading and in the title, which may begin with the number of questions that wait.
function showName() {
  const { name, state } = document.getElementById("session-state")?.dataset ?? {};
  const heading = document.getElementById("session-name");
  if (!name || !heading) return;
  if (heading.textContent !== name) heading.textContent = name;
  const count = /^\(\d+\) /.exec(document.title)?.[0] ?? "";
  document.title = `${count}${state === "waiting" ? "Waiting: " : ""}${name} · belljar`;
}

/**
 * @param {string} display
 * @param {string} html
 */
function updateDisplays(display, html) {
  if (!/^[0-9a-f]+$/.test(display)) return;
  for (const place of document.querySelectorAll(`[data-display="${display}"]`)) {
    const [element] = parsed(html);
    if (!element) continue;
    element.id = place.id;
    place.replaceWith(element);
  }
  showFrames(cells);
}

/**
 * Let cells be rewound to where a state is held, and no others.
 * @param {Record<string, string>} parts the control of each, by the id of its execution
 */
function offerWayBack(parts) {
  for (const acts of document.querySelectorAll(".cell .cell-acts")) {
    if (!((acts.closest(".cell")?.id ?? "").slice(5) in parts)) acts.remove();
  }
  for (const [id, html] of Object.entries(parts)) {
    const tools = document.querySelector(`#head-${id} .cell-tools`);
    if (tools && !tools.closest(".undone") && !tools.querySelector(".cell-acts")) tools.append(...parsed(html));
  }
}

/** @param {string} text */
function announce(text) {
  const place = document.getElementById("announcer");
  if (place) place.textContent = text;
}

// Cells that were undone are folded, and unfold by a button

function addUnfoldButtons() {
  for (const cell of document.querySelectorAll(".cell.undone")) {
    const head = cell.querySelector(".cell-head");
    if (!head || head.querySelector(".unfold")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet unfold";
    const show = () => {
      button.textContent = cell.classList.contains("open") ? "Fold" : "Show what was undone";
      button.setAttribute("aria-expanded", String(cell.classList.contains("open")));
    };
    button.addEventListener("click", () => {
      cell.classList.toggle("open");
      show();
    });
    show();
    head.append(button);
  }
}

new MutationObserver(() => {
  addUnfoldButtons();
  showLastError();
}).observe(cells, { childList: true });
addUnfoldButtons();
showLastError();
showFrames(document);
listenToFrames();
startFigures();
loadBlocks(cells);
loadWhole(cells);
startComposing();
if (isFollowing) scrollToEnd();
openStream(document.body.dataset.stream ?? "", document.body.dataset.after ?? "", receive);
