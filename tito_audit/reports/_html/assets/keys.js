// The keyboard: what each key does, in the table and in an opened rollout.
const KEYS = [
  ["?", "this list"],
  ["/", "search the findings"],
  ["j, k", "next finding, previous finding"],
  ["Enter", "details of the finding in the table"],
  ["o", "its tokens"],
  ["n, p", "next and previous difference, in an opened rollout"],
  ["← →", "from token to token"],
  ["Esc", "close"],
];

function keyboard(table, viewer) {
  const help = byId("keys");
  byId("key-list").replaceChildren(...KEYS.flatMap(([keys, words]) => [
    make("dt", {}, ...keys.split(/(, | )/).map((key) => (/^(, | )$/.test(key) ? key : make("kbd", {}, key)))), make("dd", {}, words)]));
  byId("show-keys").hidden = false;
  byId("show-keys").onclick = () => help.showModal();
  byId("close-keys").onclick = () => help.close();
  help.addEventListener("click", (event) => { if (event.target === help) help.close(); });

  const inViewer = (event) => {
    const onToken = document.activeElement.classList.contains("token");
    const actions = {
      j: () => viewer.neighbour(1), k: () => viewer.neighbour(-1), n: () => viewer.difference(1), p: () => viewer.difference(-1),
      ArrowRight: onToken ? () => viewer.step(1) : null, ArrowLeft: onToken ? () => viewer.step(-1) : null,
    };
    return actions[event.key];
  };
  const inTable = (event) => ({
    j: () => table?.step(1), n: () => table?.step(1), k: () => table?.step(-1), p: () => table?.step(-1),
    o: () => table?.openCurrent(), "/": () => { byId("find")?.focus(); byId("find")?.select(); },
  })[event.key];

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
    if (event.target instanceof Element && event.target.closest("input:not([type=checkbox]), select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const action = event.key === "?" ? () => help.showModal() : (viewer.dialog.open ? inViewer : inTable)(event);
    if (!action) return;
    event.preventDefault();
    action();
  });
}
