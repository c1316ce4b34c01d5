// Buttons that copy, also where a page may not write to the clipboard.

/** Copies a text; false if the browser lets no page do so. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

function copiedBySelection(text) {
  const area = make("textarea", { class: "hidden", "aria-hidden": "true", tabindex: "-1", readonly: "" });
  area.value = text;
  const before = document.activeElement;
  (before?.closest("dialog") ?? document.body).append(area); // outside of a modal dialog nothing can be selected
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus({ preventScroll: true });
  return done;
}

/** Selects what an element shows, so that Ctrl+C copies it. */
function selectText(node) {
  const range = document.createRange();
  range.selectNodeContents(node);
  getSelection().removeAllRanges();
  getSelection().addRange(range);
}

/** A button that copies `text`; `shown` is selected instead where copying is refused. */
function copyButton(text, name, shown = null) {
  const button = make("button", { type: "button", class: "copy", "aria-label": `Copy ${name}`, title: `Copy ${name}` });
  button.onclick = async (event) => {
    event.stopPropagation();
    const done = await copied(typeof text === "function" ? text() : text);
    button.dataset.done = done ? "yes" : "no";
    if (!done && shown) selectText(shown);
    announce(done ? `Copied ${name}` : "Copying is not allowed here: press Ctrl+C");
    setTimeout(() => { delete button.dataset.done; }, 1600);
  };
  return button;
}

/** A command or a place with its button. */
function copyable(text, name) {
  const code = make("code", {}, text);
  return make("span", { class: "copyable" }, code, copyButton(text, name, code));
}

/** Says something to screen readers, and to eyes for a moment. */
function announce(words) {
  const place = byId("said");
  (document.querySelector("dialog[open]") ?? document.body).append(place);
  place.textContent = words;
  place.hidden = false;
  clearTimeout(announce.waiting);
  announce.waiting = setTimeout(() => { place.hidden = true; }, 1600);
}

/** Says that data is missing, for as long as the page is there. */
function failed(error) {
  announce(error.message);
  clearTimeout(announce.waiting);
}

/** Gives each command that the page was written with its button. */
function copyButtons() {
  for (const code of document.querySelectorAll("code[data-copy]")) {
    code.after(copyButton(code.textContent, code.dataset.copy, code));
  }
}
