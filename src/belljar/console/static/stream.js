// One stream of changes for this page. A hidden tab closes it and comes back where it was, because browsers open six
// connections to a server at most. The page is told when the connection is lost, and since when.

/**
 * @typedef {{do: string, target: string, html?: string, text?: string, ids?: string[], list?: string, outputs?: string,
 *   ended?: string, count?: number, parts?: Record<string, string>}} Change
 */

const RETRY_MS = [1000, 2000, 5000, 10000];

/**
 * Call `apply` with every change of a page.
 * @param {string} page the name of the page, like `session:ID`
 * @param {string} after the place up to which the page has everything
 * @param {(change: Change) => void} apply
 */
export function openStream(page, after, apply) {
  let place = after;
  let failures = 0;
  /** @type {EventSource | null} */
  let source = null;
  /** @type {number | undefined} */
  let timer;
  /** @type {Date | null} */
  let lostAt = null;

  function open() {
    clearTimeout(timer);
    if (source || document.hidden) return;
    const query = new URLSearchParams({ page, after: place });
    source = new EventSource(`/console/stream?${query}`);
    source.addEventListener("open", () => {
      failures = 0;
      lostAt = null;
      showConnection("");
    });
    source.addEventListener("change", (event) => {
      const message = /** @type {MessageEvent<string>} */ (event);
      if (message.lastEventId) place = message.lastEventId;
      const change = JSON.parse(message.data);
      if (change.do === "inbox") showWaiting(change.count ?? 0);
      else apply(change);
    });
    // We reconnect ourselves, with the place in the address: a browser gives up for good at some answers.
    source.addEventListener("error", () => {
      close();
      lostAt ??= new Date();
      showConnection(`Not connected since ${lostAt.toLocaleTimeString()}; nothing is lost, trying again`);
      timer = setTimeout(open, RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)]);
      void askToSignIn();
    });
  }

  function close() {
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  open();
}

/** A server that was started again knows nobody: then the person has to sign in once more. */
async function askToSignIn() {
  const answer = await fetch("/api/v1/health", { method: "HEAD" }).catch(() => null);
  const place = document.getElementById("connection");
  if (answer?.status !== 401 || !place) return;
  const link = document.createElement("a");
  link.href = `/console/enter?next=${encodeURIComponent(location.pathname)}`;
  link.textContent = "You are signed out: sign in again";
  place.replaceChildren(link);
}

/** @param {number} count how many questions wait for a person */
export function showWaiting(count) {
  const place = document.getElementById("waiting");
  if (!place) return;
  const isMore = count > (Number(place.textContent) || 0);
  place.textContent = count ? ` ${count}` : "";
  place.hidden = !count;
  document.title = `${count ? `(${count}) ` : ""}${document.title.replace(/^\(\d+\) /, "")}`;
  const alarm = document.getElementById("alarm");
  if (alarm && isMore) alarm.textContent = "A question waits for you in the inbox";
}

/** @param {string} text */
function showConnection(text) {
  const place = document.getElementById("connection");
  if (!place) return;
  place.textContent = text;
  place.hidden = !text;
}
