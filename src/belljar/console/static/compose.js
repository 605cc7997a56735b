// The form that runs a cell: Ctrl+Enter, names that fit where one types (Tab), and all without leaving the page.

const MAX_SHOWN = 50;

export function startComposing() {
  const form = /** @type {HTMLFormElement | null} */ (document.getElementById("compose"));
  const code = /** @type {HTMLTextAreaElement | null} */ (document.getElementById("code"));
  const failure = document.getElementById("compose-error");
  const session = document.getElementById("cells")?.dataset.session;
  if (!form || !code || !failure || !session) return;
  const names = new NameList(code, session);

  code.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      names.close();
      form.requestSubmit();
    } else {
      names.handle(event);
    }
  });
  code.addEventListener("input", () => {
    names.close();
    code.rows = Math.min(24, Math.max(3, code.value.split("\n").length));
  });
  code.addEventListener("blur", () => names.close());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    if (button?.disabled) return; // it is on its way already
    failure.hidden = true;
    if (button) button.disabled = true;
    try {
      await posted(`/api/v1/sessions/${encodeURIComponent(session)}/executions`, { code: code.value });
      code.value = "";
      code.rows = 3;
    } catch (error) {
      failure.textContent = error instanceof Error ? error.message : String(error);
      failure.hidden = false;
    } finally {
      if (button) button.disabled = false;
    }
  });
}

/**
 * @param {string} path
 * @param {object} body
 */
async function posted(path, body) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  const found = await answer.json();
  if (!answer.ok)
    throw new Error(found.error.hint ? `${found.error.message}. ${found.error.hint}` : found.error.message);
  return found;
}

/** The names that fit at the cursor, as a list that the arrow keys move in while the focus stays in the text. */
class NameList {
  /**
   * @param {HTMLTextAreaElement} code
   * @param {string} session
   */
  constructor(code, session) {
    this.code = code;
    this.session = session;
    this.list = /** @type {HTMLElement} */ (document.getElementById("names"));
    this.start = 0;
    this.end = 0;
    this.chosen = -1;
    /** @type {string | null} */
    this.asked = null;
    this.list.addEventListener("mousedown", (event) => {
      const option = event.target instanceof Element ? event.target.closest("[role=option]") : null;
      if (!option) return;
      event.preventDefault();
      this.chosen = [...this.list.children].indexOf(option);
      this.take();
    });
  }

  get isOpen() {
    return !this.list.hidden;
  }

  /** @param {KeyboardEvent} event */
  handle(event) {
    if (event.shiftKey || event.altKey || event.ctrlKey || event.metaKey) return;
    if (this.isOpen) {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) this.choose(this.chosen + step);
      else if (event.key === "Tab" || event.key === "Enter") this.take();
      else if (event.key === "Escape") this.close();
      else return;
      event.preventDefault();
    } else if (event.key === "Tab" && /[\w.]$/.test(this.before()) && this.asked !== this.before()) {
      // Where no name is being written, and the second time, Tab goes on to the button, as everywhere.
      event.preventDefault();
      this.asked = this.before();
      void this.ask();
    }
  }

  before() {
    return this.code.selectionStart === this.code.selectionEnd
      ? this.code.value.slice(0, this.code.selectionStart)
      : "";
  }

  async ask() {
    const text = this.code.value;
    const before = this.before();
    // Python counts characters where JavaScript counts halves of some of them.
    const request = { code: text, cursor: [...before].length };
    const found = await posted(`/api/v1/sessions/${encodeURIComponent(this.session)}/complete`, request).catch(
      () => null,
    );
    if (!found || this.code.value !== text || this.before() !== before) return;
    this.start = [...text].slice(0, found.start).join("").length;
    this.end = [...text].slice(0, found.end).join("").length;
    if (found.matches.length === 1) this.insert(found.matches[0]);
    else this.show(found.matches);
  }

  /** @param {string[]} matches */
  show(matches) {
    this.list.replaceChildren(
      ...matches.slice(0, MAX_SHOWN).map((match, place) => {
        const option = document.createElement("li");
        option.id = `name-${place}`;
        option.setAttribute("role", "option");
        option.textContent = match;
        return option;
      }),
    );
    say(
      matches.length
        ? `${matches.length} names fit; the arrow keys choose one`
        : "No name fits, or the session is busy",
    );
    if (!matches.length) return;
    this.list.hidden = false;
    this.code.setAttribute("role", "combobox");
    this.code.setAttribute("aria-expanded", "true");
    this.code.setAttribute("aria-controls", "names");
    this.choose(0);
  }

  /** @param {number} place */
  choose(place) {
    const options = [...this.list.children];
    this.chosen = (place + options.length) % options.length;
    for (const [number, option] of options.entries())
      option.setAttribute("aria-selected", String(number === this.chosen));
    const option = options[this.chosen];
    option.scrollIntoView({ block: "nearest" });
    this.code.setAttribute("aria-activedescendant", option.id);
  }

  take() {
    const option = this.list.children[this.chosen];
    this.close();
    if (option) this.insert(option.textContent ?? "");
  }

  /** @param {string} name */
  insert(name) {
    this.code.setRangeText(name, this.start, this.end, "end");
    say(name);
  }

  close() {
    if (!this.isOpen) return;
    this.list.hidden = true;
    for (const name of ["role", "aria-expanded", "aria-controls", "aria-activedescendant"])
      this.code.removeAttribute(name);
  }
}

/** @param {string} text */
function say(text) {
  const place = document.getElementById("announcer");
  if (place) place.textContent = text;
}
