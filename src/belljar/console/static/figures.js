// Figures: a click shows one as large as the window, until the next click or Escape.

/** @param {HTMLElement} link */
function enlarge(link) {
  const picture = link.querySelector("img");
  if (!picture) return;
  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  dialog.setAttribute("aria-label", picture.alt);
  const large = document.createElement("img");
  large.src = picture.src;
  large.alt = picture.alt;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Close";
  dialog.append(large, button);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

export function startFigures() {
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest("[data-enlarge]") : null;
    if (!(link instanceof HTMLElement) || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    enlarge(link);
  });
}
