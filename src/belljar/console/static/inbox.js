// What waits for a person. New questions are announced at once; a form that somebody fills in is left alone.
import { append } from "./patch.js";
import { openStream } from "./stream.js";

/** @param {import("./stream.js").Change} change */
function apply(change) {
  if (change.do === "question" && change.html && !document.getElementById(change.target)) {
    append("questions", change.html);
    const place = document.getElementById("alarm");
    if (place) place.textContent = "A new question waits";
  }
  if (change.do === "waiting") {
    for (const question of document.querySelectorAll(".question")) {
      if (!change.ids?.includes(question.id)) question.remove();
    }
  }
  const count = document.getElementById("questions")?.childElementCount ?? 0;
  document.title = `${count ? `(${count}) ` : ""}Inbox · belljar`;
  const empty = document.getElementById("empty");
  if (empty) empty.hidden = count > 0;
}

openStream(document.body.dataset.stream ?? "", "", apply);
