// Files that are dropped on the page are uploaded into the folder that it shows, one after another.

const form = /** @type {HTMLFormElement | null} */ (document.getElementById("upload"));
const place = document.getElementById("drop");

/** @param {DragEvent} event */
const hasFiles = (event) => event.dataTransfer?.types.includes("Files") ?? false;

/** @param {string} text */
function complain(text) {
  const alarm = document.getElementById("upload-error");
  if (!alarm) return;
  alarm.textContent = text;
  alarm.hidden = !text;
}

/** @param {File} file */
async function upload(file) {
  if (!form) return;
  const data = new FormData();
  data.set("folder", new FormData(form).get("folder") ?? "");
  data.set("file", file);
  const answer = await fetch(form.action, { method: "POST", body: data });
  if (answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  throw new Error(page.querySelector("h1")?.textContent ?? `the server answered with ${answer.status}`);
}

/** @param {File[]} files */
async function uploadAll(files) {
  complain("");
  for (const file of files) {
    try {
      await upload(file);
    } catch (error) {
      complain(`${file.name} was not uploaded: ${error instanceof Error ? error.message : "not connected"}`);
      return;
    }
  }
  location.reload();
}

if (form) {
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    place?.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) place?.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    place?.classList.remove("over");
    void uploadAll([...(event.dataTransfer?.files ?? [])]);
  });
}

export {};
