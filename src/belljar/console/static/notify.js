// Notifications of the browser about questions that wait, for those who want them. A hidden tab closes its stream of
// changes, so one tab of all keeps a small one open for this: the one that holds the lock.

const ON = "belljar-notify";
const LOCK = "belljar-notify";

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
      return;
    }
    const answer = await Notification.requestPermission();
    if (answer === "granted") localStorage.setItem(ON, "1");
    box.checked = answer === "granted";
    const told = document.getElementById("notify-told");
    if (told) told.hidden = answer === "granted";
    if (answer === "granted") listen();
  });
  if (isOn()) listen();
}

function listen() {
  void navigator.locks.request(LOCK, () => new Promise(() => follow()));
}

function follow() {
  let known = Number(document.getElementById("waiting")?.textContent) || 0;
  const source = new EventSource("/console/stream?page=waiting");
  source.addEventListener("change", (event) => {
    const { do: what, count } = JSON.parse(/** @type {MessageEvent<string>} */ (event).data);
    if (what !== "inbox") return;
    if (count > known && document.hidden && isOn()) tell(count);
    known = count;
  });
}

/** @param {number} count */
function tell(count) {
  // Nothing of the question itself: it may be read on a locked screen.
  const words = count === 1 ? "A question waits for you" : `${count} questions wait for you`;
  const notification = new Notification("belljar", { body: words, tag: LOCK });
  notification.addEventListener("click", () => {
    window.focus();
    location.assign("/console/inbox");
  });
}
