// The list of sessions, kept current.
import { parsed } from "./patch.js";
import { openStream } from "./stream.js";

/** @param {import("./stream.js").Change} change */
function apply(change) {
  if (change.do === "reload") {
    location.reload();
    return;
  }
  const known = document.getElementById(change.target);
  if (change.do === "remove") known?.remove();
  if (change.do === "row" && change.html) {
    const [row] = parsed(change.html);
    const list = document.getElementById(change.list ?? "live");
    if (!row || !list) return;
    // A filtered list is as long as it was when it was asked for; what is in it stays current.
    if (!known && "filtered" in document.body.dataset) return;
    // A row that has the focus is replaced without losing it.
    const hadFocus = known?.contains(document.activeElement);
    if (known && known.parentElement === list) known.replaceWith(row);
    else {
      known?.remove();
      list.prepend(row);
    }
    if (hadFocus) row.querySelector("a")?.focus();
    document.getElementById("empty")?.remove();
  }
  const others = document.getElementById("others");
  const title = document.getElementById("others-title");
  if (title) title.hidden = !others?.childElementCount;
}

openStream(document.body.dataset.stream ?? "", document.body.dataset.after ?? "", apply);
