// Notifications of the browser about questions that wait, for those who want them. A hidden tab closes its stream of
// changes, so one tab of all keeps a small one open for this: the one that holds the lock. It tells the others how many
// questions wait, so that the titles of hidden tabs count them too.
import { showWaiting } from "./stream.js";

const ON = "belljar-notify";
const LOCK = "belljar-notify";
const RETRY_MS = 10_000;
const ANSWER_MS = 300;
const ASKED = "does anybody look?";
const LOOKING = "yes";
const channel = new BroadcastChannel(LOCK);

function isPossible() {
  return "Notification" in window && "locks" in navigator;
}

function isOn() {
  return localStorage.getItem(ON) !== null && Notification.permission === "granted";
}

export function startNotifications() {
  const box = /** @type {HTMLInputElement | null} */ (document.getElementById("notify-on"));
  const place = document.getElementById("notify");
  if (!box || !place || !isPossible()) return;
  place.hidden = false;
  box.checked = isOn();
  box.addEventListener("change", async () => {
    if (!box.checked) {
      localStorage.removeItem(ON);
      leave?.();
      return;
    }
    const answer = await Notification.requestPermission();
    if (answer === "granted") localStorage.setItem(ON, "1");
    box.checked = answer === "granted";
    const blocked = document.getElementById("notify-blocked");
    if (blocked) blocked.hidden = answer === "granted";
    if (answer === "granted") listen();
  });
  // Another tab has switched it on or off.
  addEventListener("storage", (event) => {
    if (event.key !== ON) return;
    box.checked = isOn();
    if (isOn()) listen();
    else leave?.();
  });
  channel.addEventListener("message", (event) => {
    if (typeof event.data === "number") showWaiting(event.data);
    if (event.data === ASKED && !document.hidden) channel.postMessage(LOOKING);
  });
  if (isOn()) listen();
}

let isListening = false;
/** @type {(() => void) | null} ends the stream of this tab, if it is the one that has it */
let leave = null;

async function listen() {
  if (isListening) return;
  isListening = true;
  while (isOn()) {
    await navigator.locks.request(LOCK, () => new Promise((done) => follow(() => done(null))));
    // Refused: signed out, or too many streams. Another tab may be let in meanwhile.
    if (isOn()) await new Promise((done) => setTimeout(done, RETRY_MS));
  }
  isListening = false;
}

/** @param {() => void} done */
function follow(done) {
  if (!isOn()) {
    done();
    return;
  }
  let known = Number(document.getElementById("waiting")?.textContent) || 0;
  const source = new EventSource("/console/stream?page=waiting");
  leave = () => {
    leave = null;
    source.close();
    done();
  };
  source.addEventListener("error", () => {
    if (source.readyState === EventSource.CLOSED) leave?.();
  });
  source.addEventListener("change", (event) => {
    const { do: what, count } = JSON.parse(/** @type {MessageEvent<string>} */ (event).data);
    if (what !== "inbox") return;
    if (count > known) void tellUnlessSeen(count);
    known = count;
    showWaiting(count);
    channel.postMessage(count);
  });
}

/**
 * Whoever looks at a tab of the console, this one or another, sees it there.
 * @param {number} count
 */
async function tellUnlessSeen(count) {
  if (!document.hidden) return;
  const isSeen = await new Promise((done) => {
    /** @param {MessageEvent} event */
    const hear = (event) => event.data === LOOKING && done(true);
    channel.addEventListener("message", hear);
    channel.postMessage(ASKED);
    setTimeout(() => {
      channel.removeEventListener("message", hear);
      done(false);
    }, ANSWER_MS);
  });
  if (!isSeen && isOn()) tell(count);
}

/** @param {number} count */
function tell(count) {
  // Nothing of the question itself: it may be read on a locked screen.
  const body = count === 1 ? "A question waits for you" : `${count} questions wait for you`;
  const notification = new Notification("belljar", { body, tag: LOCK });
  notification.addEventListener("click", () => {
    window.focus();
    location.assign("/console/inbox");
  });
}
