// Frames with what cells displayed. A frame may tell one thing: its height, as a number, which is bounded here. Scripts
// of an output run only in a frame that a person asked for, by a click or once for the whole session.

const LEAST = 60;
const MOST = 4000;
const SLACK = 2;
// A page that is as high as its frame, and a little more, asks for the same step again and again: it would never end.
const SAME_STEPS = 3;
/** @type {WeakMap<HTMLIFrameElement, { step: number, times: number }>} */
const steps = new WeakMap();

/** @param {number} height */
function bounded(height) {
  return Math.min(MOST, Math.max(LEAST, height));
}

/**
 * Give frames the height that the server guessed, until they tell their own; run those that always run.
 * @param {ParentNode} part
 */
export function showFrames(part) {
  for (const frame of part.querySelectorAll("iframe[data-height]")) {
    const element = /** @type {HTMLIFrameElement} */ (frame);
    if (!element.style.height) element.style.height = `${bounded(Number(element.dataset.height) || LEAST)}px`;
  }
  if (!runsAlways()) return;
  for (const button of part.querySelectorAll("[data-run-frame]:not([aria-pressed])"))
    run(/** @type {HTMLElement} */ (button));
}

export function listenToFrames() {
  addEventListener("message", (event) => {
    if (typeof event.data !== "number" || !Number.isFinite(event.data)) return;
    for (const frame of document.querySelectorAll("iframe")) {
      if (frame.contentWindow !== event.source) continue;
      const step = event.data - (Number.parseFloat(frame.style.height) || 0);
      if (Math.abs(step) <= SLACK) continue;
      const last = steps.get(frame);
      const times = last?.step === step ? last.times + 1 : 1;
      steps.set(frame, { step, times });
      if (step < 0 || times <= SAME_STEPS) frame.style.height = `${bounded(event.data + SLACK)}px`;
    }
  });
  // Those that had loaded before anybody listened tell it once more.
  for (const frame of document.querySelectorAll("iframe")) frame.contentWindow?.postMessage("height", "*");
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-run-frame]") : null;
    if (!(button instanceof HTMLElement)) return;
    if (button.getAttribute("aria-pressed") === "true") close(button);
    else run(button);
  });
  document.addEventListener("change", (event) => {
    const box = event.target;
    if (box instanceof HTMLInputElement && box.matches("[data-always]")) remember(box.checked);
  });
}

/** Show the interactive version in place of the picture. @param {HTMLElement} button */
function run(button) {
  const source = button.dataset.runFrame ?? "";
  const block = button.closest(".block");
  const shown = block?.querySelector(".shown");
  if (!source.startsWith("/frames/") || !(shown instanceof HTMLElement)) return;
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.loading = "lazy";
  frame.title = "interactive output";
  frame.src = source;
  // As high as the picture, so that nothing below it moves.
  frame.style.height = `${bounded(shown.offsetHeight > LEAST ? shown.offsetHeight : 460)}px`;
  shown.hidden = true;
  shown.before(frame);
  button.setAttribute("aria-pressed", "true");
  button.textContent = button.dataset.back ?? "";
  const label = document.createElement("label");
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = runsAlways();
  box.dataset.always = "";
  label.append(box, "Always in this session");
  button.after(label);
}

/** @param {HTMLElement} button */
function close(button) {
  const block = button.closest(".block");
  block?.querySelector("iframe")?.remove();
  /** @type {HTMLElement | null | undefined} */ (block?.querySelector(".shown"))?.removeAttribute("hidden");
  button.parentElement?.querySelector("label")?.remove();
  button.setAttribute("aria-pressed", "false");
  button.textContent = button.dataset.label ?? "";
}

// In this browser, by the session's id

function key() {
  return `belljar-interactive-${document.getElementById("cells")?.dataset.session ?? ""}`;
}

function runsAlways() {
  return localStorage.getItem(key()) === "always";
}

/** @param {boolean} always */
function remember(always) {
  if (always) localStorage.setItem(key(), "always");
  else localStorage.removeItem(key());
  /** @type {NodeListOf<HTMLInputElement>} */
  const boxes = document.querySelectorAll("[data-always]");
  for (const box of boxes) box.checked = always;
  if (always) showFrames(document);
}
