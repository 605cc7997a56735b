// The health of the server, kept current: all of it is replaced when something in it has changed.
import { replace } from "./patch.js";
import { openStream } from "./stream.js";

openStream(document.body.dataset.stream ?? "", "", (change) => {
  // Not while somebody selects in it, or moves through it by the keyboard: the next change comes in a moment.
  const part = document.getElementById(change.target);
  const isUsed = part?.contains(document.activeElement) || !document.getSelection()?.isCollapsed;
  if (change.do === "replace" && change.html && !isUsed) replace(change.target, change.html);
});
