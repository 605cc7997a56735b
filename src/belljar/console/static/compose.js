// The form that runs a cell: Ctrl+Enter, and without leaving the page.

export function startComposing() {
  const form = /** @type {HTMLFormElement | null} */ (document.getElementById("compose"));
  const code = /** @type {HTMLTextAreaElement | null} */ (document.getElementById("code"));
  const told = document.getElementById("compose-told");
  const session = document.getElementById("cells")?.dataset.session;
  if (!form || !code || !told || !session) return;

  code.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  code.addEventListener("input", () => {
    code.rows = Math.min(24, Math.max(3, code.value.split("\n").length));
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    if (button?.disabled) return; // it is on its way already
    told.hidden = true;
    if (button) button.disabled = true;
    try {
      const answer = await fetch(`/api/v1/sessions/${encodeURIComponent(session)}/executions`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ code: code.value }),
      });
      if (!answer.ok) {
        const { error } = await answer.json();
        throw new Error(error.hint ? `${error.message}. ${error.hint}` : error.message);
      }
      code.value = "";
      code.rows = 3;
    } catch (error) {
      told.textContent = error instanceof Error ? error.message : String(error);
      told.hidden = false;
    } finally {
      if (button) button.disabled = false;
    }
  });
}
