// Frames with what cells displayed. A frame may tell one thing: its height, as a number, which is bounded here. Scripts
// of an output run only in a frame that a person asked for.

const LEAST = 60;
const MOST = 4000;
const SLACK = 2;

/** @param {number} height */
function bounded(height) {
  return Math.min(MOST, Math.max(LEAST, height));
}

/**
 * Give frames the height that the server guessed, until they tell their own.
 * @param {ParentNode} part
 */
export function sizeFrames(part) {
  for (const frame of part.querySelectorAll("iframe[data-height]")) {
    const element = /** @type {HTMLIFrameElement} */ (frame);
    if (!element.style.height) element.style.height = `${bounded(Number(element.dataset.height) || LEAST)}px`;
  }
}

export function listenToFrames() {
  addEventListener("message", (event) => {
    if (typeof event.data !== "number" || !Number.isFinite(event.data)) return;
    for (const frame of document.querySelectorAll("iframe")) {
      if (frame.contentWindow === event.source) frame.style.height = `${bounded(event.data + SLACK)}px`;
    }
  });
  // Those that had loaded before anybody listened tell it once more.
  for (const frame of document.querySelectorAll("iframe")) frame.contentWindow?.postMessage("height", "*");
  document.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-run-frame]") : null;
    if (button instanceof HTMLElement) runFrame(button);
  });
}

/** @param {HTMLElement} button */
function runFrame(button) {
  const source = button.dataset.runFrame ?? "";
  if (!source.startsWith("/frames/")) return;
  const frame = document.createElement("iframe");
  frame.setAttribute("sandbox", "allow-scripts");
  frame.title = "interactive output";
  frame.src = source;
  frame.style.height = "460px";
  const details = button.closest("details");
  details?.replaceWith(frame);
}
