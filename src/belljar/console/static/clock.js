// Shows how long something has been running, once a second, for elements with `data-since`, how long is left for those
// with `data-until`, and times of day as clocks here show them.

/** @param {number} seconds */
function durationText(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function startClock() {
  const tick = () => {
    if (document.hidden) return;
    // Times of day, which the server writes as UTC, as clocks here show them.
    for (const element of /** @type {NodeListOf<HTMLTimeElement>} */ (
      document.querySelectorAll("time:not([data-local])")
    )) {
      const at = new Date(element.dateTime);
      element.dataset.local = "";
      if (!Number.isNaN(at.valueOf())) element.textContent = at.toLocaleTimeString([], { hour12: false });
    }
    for (const element of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-since]"))) {
      const seconds = (Date.now() - Date.parse(element.dataset.since ?? "")) / 1000;
      if (Number.isFinite(seconds)) element.textContent = durationText(Math.max(0, seconds));
    }
    for (const element of /** @type {NodeListOf<HTMLElement>} */ (document.querySelectorAll("[data-until]"))) {
      const seconds = (Date.parse(element.dataset.until ?? "") - Date.now()) / 1000;
      if (Number.isFinite(seconds)) element.textContent = seconds > 0 ? `in ${durationText(seconds)}` : "now";
    }
  };
  tick();
  setInterval(tick, 1000);
}
