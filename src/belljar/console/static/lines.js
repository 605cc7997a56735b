// The whole output of one execution: a window of lines around what is seen, which the server renders. Browsers end at
// some millions of pixels, so the height is bounded, and a million lines are scaled into it.
import { parsed } from "./patch.js";

const LINE_PIXELS = 20;
const MAX_PIXELS = 8_000_000;
const AT_ONCE = 200;
const LOOK_MS = 1000;

/** @typedef {{first: number, total: number, complete: boolean, list: HTMLElement}} Part */

class Viewer {
  /** @param {HTMLElement} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.execution = viewer.dataset.execution ?? "";
    this.total = Number(viewer.dataset.total) || 0;
    this.isComplete = viewer.dataset.complete === "yes";
    this.space = /** @type {HTMLElement} */ (viewer.querySelector(".space"));
    this.followBox = /** @type {HTMLInputElement} */ (document.getElementById("follow-end"));
    /** @type {number[]} */
    this.matches = [];
    this.match = -1;
    this.wanted = 1;
    this.isLoading = false;
    /** @type {Part | null} */
    this.part = null;
  }

  start() {
    document.getElementById("line-pages")?.remove();
    this.viewer.classList.add("windowed");
    this.resize();
    this.viewer.addEventListener("scroll", () => this.onScroll(), { passive: true });
    addEventListener("hashchange", () => this.toHash());
    this.startSearch();
    const place = /** @type {HTMLElement} */ (this.followBox.closest("label"));
    place.hidden = this.isComplete;
    this.followBox.addEventListener("change", () => {
      if (!this.followBox.checked) return;
      this.viewer.scrollIntoView({ block: "nearest" });
      this.toLine(this.total);
    });
    if (!this.isComplete) this.look();
    if (!this.toHash()) this.toLine(Number(this.viewer.dataset.first) || 1);
    const text = /** @type {HTMLInputElement | null} */ (document.getElementById("q"))?.value;
    if (text) void this.search(text);
  }

  get height() {
    return Math.min(MAX_PIXELS, this.total * LINE_PIXELS);
  }

  get seen() {
    return Math.max(1, Math.floor(this.viewer.clientHeight / LINE_PIXELS));
  }

  /** How many pixels of the scroll bar are one line. */
  get scale() {
    const steps = Math.max(1, this.total - this.seen);
    return Math.max(0, this.height - this.viewer.clientHeight) / steps;
  }

  resize() {
    this.space.style.height = `${this.height}px`;
    const place = document.getElementById("total");
    if (place) place.textContent = this.total.toLocaleString("en");
  }

  onScroll() {
    const first = this.scale ? Math.round(this.viewer.scrollTop / this.scale) + 1 : 1;
    if (this.viewer.scrollTop + this.viewer.clientHeight < this.height - LINE_PIXELS) this.followBox.checked = false;
    void this.load(first);
  }

  /** @param {number} line */
  toLine(line) {
    const first = Math.max(1, Math.min(line, this.total));
    this.viewer.scrollTop = (first - 1) * this.scale;
    void this.load(Math.min(first, Math.max(1, this.total - this.seen + 1)));
  }

  toHash() {
    const line = Number(/^#line-(\d{1,9})$/.exec(location.hash)?.[1]);
    if (!line) return false;
    this.viewer.scrollIntoView({ block: "nearest" });
    this.toLine(Math.max(1, line - 3));
    return true;
  }

  /**
   * Show the window around a line, from what is here or from the server; the last wish counts.
   * @param {number} first
   */
  async load(first) {
    this.wanted = first;
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      while (true) {
        const line = this.wanted;
        if (!this.has(line)) this.part = await this.fetch(Math.max(1, line - Math.floor((AT_ONCE - this.seen) / 2)));
        this.place(line);
        if (line === this.wanted) return;
      }
    } catch {
      // The connection is lost: what is seen stays, and the next scroll asks again.
    } finally {
      this.isLoading = false;
    }
  }

  /** @param {number} line */
  has(line) {
    const part = this.part;
    if (!part || line < part.first) return false;
    const end = part.first + part.list.childElementCount;
    return Math.min(line + this.seen, this.total + 1) <= end && (part.total === this.total || end <= part.total);
  }

  /**
   * @param {number} first
   * @returns {Promise<Part>}
   */
  async fetch(first) {
    const query = new URLSearchParams({ first: String(first) });
    const answer = await fetch(`/console/executions/${encodeURIComponent(this.execution)}/lines?${query}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    const [list] = parsed(await answer.text());
    if (!(list instanceof HTMLElement)) throw new Error("no lines");
    this.total = Number(list.dataset.total);
    this.isComplete = list.dataset.complete === "yes";
    this.resize();
    return { first: Number(list.dataset.first), total: this.total, complete: this.isComplete, list };
  }

  /** @param {number} line */
  place(line) {
    const part = this.part;
    if (!part) return;
    const current = this.viewer.querySelector(".lines");
    if (current !== part.list) current?.replaceWith(part.list);
    part.list.style.transform = `translateY(${(line - 1) * this.scale - (line - part.first) * LINE_PIXELS}px)`;
    this.mark();
  }

  // While it runs

  look() {
    setTimeout(async () => {
      if (!document.hidden) {
        const before = this.total;
        await this.fetch(this.total + 1).catch(() => null);
        if (this.followBox.checked && this.total > before) this.toLine(this.total);
        else if (this.total > before) void this.load(this.wanted);
      }
      if (!this.isComplete) this.look();
      else {
        /** @type {HTMLElement} */ (this.followBox.closest("label")).hidden = true;
      }
    }, LOOK_MS);
  }

  // Search, which the server does

  startSearch() {
    const form = /** @type {HTMLFormElement | null} */ (document.getElementById("search"));
    const field = /** @type {HTMLInputElement | null} */ (document.getElementById("q"));
    form?.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.search(field?.value ?? "");
    });
    document.getElementById("next-match")?.addEventListener("click", () => this.toMatch(this.match + 1));
    document.getElementById("previous-match")?.addEventListener("click", () => this.toMatch(this.match - 1));
  }

  /** @param {string} text */
  async search(text) {
    const query = new URLSearchParams({ first: "1", count: "1", q: text });
    const answer = await fetch(`/api/v1/executions/${encodeURIComponent(this.execution)}/lines?${query}`);
    this.matches = text && answer.ok ? (await answer.json()).matches : [];
    this.match = -1;
    for (const id of ["next-match", "previous-match"]) {
      const button = document.getElementById(id);
      if (button) button.hidden = !this.matches.length;
    }
    if (this.matches.length) this.toMatch(0);
    else this.tell(text ? "no line has it" : "");
  }

  /** @param {number} place */
  toMatch(place) {
    this.match = (place + this.matches.length) % this.matches.length;
    const line = this.matches[this.match];
    const count = `${this.matches.length}${this.matches.length >= 1000 ? " or more" : ""}`;
    this.tell(`line ${line.toLocaleString("en")}, ${this.match + 1} of ${count}`);
    this.viewer.scrollIntoView({ block: "nearest" });
    this.toLine(Math.max(1, line - 3));
    this.mark();
  }

  mark() {
    const line = this.matches[this.match];
    for (const item of this.viewer.querySelectorAll(".match")) item.classList.remove("match");
    if (line) document.getElementById(`line-${line}`)?.classList.add("match");
  }

  /** @param {string} text */
  tell(text) {
    const place = document.getElementById("found");
    if (place) place.textContent = text;
  }
}

const viewer = /** @type {HTMLElement | null} */ (document.getElementById("viewer"));
if (viewer) new Viewer(viewer).start();
