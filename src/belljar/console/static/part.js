// The part of a page that is made anew when something in it has changed: health, runs, one run.
import { replace } from "./patch.js";
import { openStream } from "./stream.js";

/** What somebody has opened, scrolled or focused in a part, to find it in the new one. @param {Element} part */
function placeIn(part) {
  const active = document.activeElement;
  const focused = active && part.contains(active) ? active : null;
  return {
    opened: [...part.querySelectorAll("details[open][id]")].map((one) => one.id),
    scrolled: [...part.querySelectorAll("[id][tabindex]")].map((one) => [one.id, one.scrollTop, one.scrollLeft]),
    focused: focused?.id ? `#${CSS.escape(focused.id)}` : selectorOf(focused),
    hasFocus: focused !== null,
  };
}

/** @param {Element | null} element */
function selectorOf(element) {
  if (element instanceof HTMLAnchorElement) return `a[href="${CSS.escape(element.getAttribute("href") ?? "")}"]`;
  const details = element?.closest("details[id]");
  return details ? `#${CSS.escape(details.id)} > summary` : "";
}

// A long graph begins where something happens.
const busy = document.querySelector(".box-failed, .box-waiting, .box-running");
const frame = busy?.closest("#graph-frame");
if (busy && frame) {
  const below = busy.getBoundingClientRect().bottom - frame.getBoundingClientRect().bottom;
  if (below > 0) frame.scrollTop = below + frame.clientHeight / 2;
}

openStream(document.body.dataset.stream ?? "", "", (change) => {
  if (change.do === "reload") location.reload();
  const part = document.getElementById(change.target);
  if (change.do !== "replace" || !change.html || !part) return;
  const selection = document.getSelection();
  const isSelecting = !selection?.isCollapsed && selection?.anchorNode && part.contains(selection.anchorNode);
  const place = placeIn(part);
  // Not while somebody selects in it, or is where nothing can be found again: the next change comes in a moment.
  if (isSelecting || (place.hasFocus && !place.focused)) return;
  const next = replace(change.target, change.html);
  if (!next) return;
  for (const id of place.opened) document.getElementById(id)?.setAttribute("open", "");
  for (const [id, top, left] of place.scrolled)
    document.getElementById(String(id))?.scrollTo(Number(left), Number(top));
  if (place.focused)
    /** @type {HTMLElement | null} */ (next.querySelector(place.focused))?.focus({ preventScroll: true });
  const title = next instanceof HTMLElement && next.dataset.title;
  const count = /^\(\d+\) /.exec(document.title)?.[0] ?? "";
  if (title) document.title = `${count}${title} · belljar`;
});
