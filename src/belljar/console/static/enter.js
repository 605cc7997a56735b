// Signs in with the token of a link. It stands behind `#`, which browsers send to nobody, and goes to the server in a form.
const form = /** @type {HTMLFormElement | null} */ (document.getElementById("link"));
const token = location.hash.slice(1);
if (form && token) {
  history.replaceState(null, "", location.pathname + location.search);
  const field = /** @type {HTMLInputElement | null} */ (form.elements.namedItem("token"));
  if (field) field.value = token;
  form.hidden = false;
  form.submit();
}
