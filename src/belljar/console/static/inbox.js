// What waits for a person. New questions are announced at once; a form that somebody fills in is left alone.
import { append } from "./patch.js";
import { openStream, showWaiting } from "./stream.js";

// The page of one question shows no others.
const isOnly = "only" in document.body.dataset;

/** @param {import("./stream.js").Change} change */
function apply(change) {
  if (change.do === "question" && change.html && !isOnly && !document.getElementById(change.target)) {
    append("questions", change.html);
  }
  if (change.do === "waiting") {
    for (const question of document.querySelectorAll(".question")) {
      if (change.ids?.includes(question.id)) continue;
      if (isOnly) location.reload();
      else question.remove();
    }
    showWaiting(change.ids?.length ?? 0);
  }
  const empty = document.getElementById("empty");
  if (empty) empty.hidden = Boolean(document.querySelector(".question"));
}

openStream(document.body.dataset.stream ?? "", "", apply);
