// Puts parts of HTML, which the server rendered and escaped, into the page. They are parsed apart from the document, so
// nothing in them is fetched or run before it is put into its place, and scripts in them never run.

/**
 * Return the elements of a part.
 * @param {string} html
 * @returns {Element[]}
 */
export function parsed(html) {
  const part = new DOMParser().parseFromString(html, "text/html");
  return [...part.body.children].map((element) => document.adoptNode(element));
}

/**
 * Replace the element of an id; return the new one.
 * @param {string} id
 * @param {string} html
 */
export function replace(id, html) {
  const place = document.getElementById(id);
  const [element] = parsed(html);
  if (!place || !element) return null;
  place.replaceWith(element);
  return element;
}

/**
 * Append a part to the element of an id, unless it is there already.
 * @param {string} id
 * @param {string} html
 */
export function append(id, html) {
  const place = document.getElementById(id);
  if (!place) return;
  for (const element of parsed(html)) {
    const known = element.id && document.getElementById(element.id);
    if (known) known.replaceWith(element);
    else place.append(element);
  }
}

/**
 * Add text to the end of an element, as text.
 * @param {string} id
 * @param {string} text
 */
export function addText(id, text) {
  document.querySelector(`#${CSS.escape(id)} > pre`)?.append(printable(text));
}

// As the server does it: a sign for characters that would control rather than show something.
// biome-ignore lint/suspicious/noControlCharactersInRegex: these are the characters to find
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]/g;

/** @param {string} text */
function printable(text) {
  return text.replace(UNSEEN, (found) => (/[\ud800-\udfff]/.test(found) ? found : "\ufffd"));
}
