// Earlier cells: a block of them stands as an empty space of about its height, and is fetched when it comes near.
import { showFrames } from "./frames.js";
import { parsed } from "./patch.js";

const NEAR = "1500px 0px";

/** @param {HTMLElement} cells */
export function loadBlocks(cells) {
  const session = cells.dataset.session ?? "";
  /** @type {Promise<void>} */
  let last = Promise.resolve();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        observer.unobserve(entry.target);
        const spacer = /** @type {HTMLElement} */ (entry.target);
        last = last.then(() => fill(session, spacer)).catch(() => observer.observe(spacer));
      }
    },
    { rootMargin: NEAR },
  );
  for (const spacer of /** @type {NodeListOf<HTMLElement>} */ (cells.querySelectorAll(".spacer"))) {
    spacer.style.height = `${Number(spacer.dataset.height) || 1000}px`;
    observer.observe(spacer);
  }
}

/**
 * @param {string} session
 * @param {HTMLElement} spacer
 */
async function fill(session, spacer) {
  const query = new URLSearchParams({ cursor: spacer.dataset.cursor ?? "" });
  const answer = await fetch(`/console/sessions/${encodeURIComponent(session)}/cells?${query}`);
  if (!answer.ok) throw new Error(`${answer.status}`);
  const elements = parsed(await answer.text());
  // What is on the screen stays where it is, although what is above it changes its height.
  const anchor = [...document.querySelectorAll(".cell")].find((cell) => cell.getBoundingClientRect().bottom > 0);
  const before = anchor?.getBoundingClientRect().top ?? 0;
  spacer.replaceWith(...elements);
  for (const element of elements) showFrames(element);
  if (anchor) scrollBy(0, anchor.getBoundingClientRect().top - before);
}

/** Show all of an output in place of its beginning and its end. @param {HTMLElement} cells */
export function loadWhole(cells) {
  cells.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-whole]") : null;
    if (button instanceof HTMLButtonElement && !button.disabled) void showWhole(button);
  });
}

/** @param {HTMLButtonElement} button */
async function showWhole(button) {
  const words = button.textContent;
  button.disabled = true;
  button.textContent = "Loading…";
  const answer = await fetch(button.dataset.whole ?? "").catch(() => null);
  const output = button.closest(".outputs");
  if (!answer?.ok || !output) {
    button.textContent = `${words} (it did not load: try again)`;
    button.disabled = false;
    return;
  }
  const elements = parsed(await answer.text());
  const place = output.getBoundingClientRect().top;
  output.replaceChildren(...elements);
  showFrames(output);
  scrollBy(0, output.getBoundingClientRect().top - place);
  /** @type {HTMLElement} */ (output.closest(".cell"))?.focus({ preventScroll: true });
}
