// One finding as a row of the table, and what opens under it.
const IN_ROW = 8; // maximum tokens of a side in a row

/** A text with what the search asks for marked in it. */
function marked(text) {
  const words = searchable(readState().q.trim());
  const where = searchable(text);
  if (words === "" || where.length !== text.length) return [text];
  const nodes = [];
  let at = 0;
  for (let next = where.indexOf(words); next >= 0; next = where.indexOf(words, at)) {
    nodes.push(text.slice(at, next), make("mark", {}, text.slice(next, next + words.length)));
    at = next + words.length;
  }
  return [...nodes, text.slice(at)];
}

function row(finding, opener) {
  const toggle = make("button", { type: "button", class: "toggle", "aria-expanded": "false", "aria-label": `Details of ${finding.code} at ${finding.place}` });
  const line = make("tr", {},
    make("td", {}, toggle),
    make("td", {}, badge(finding.severity)),
    make("td", { class: "mono" }, finding.code),
    make("td", { title: placeWords(finding.file, finding.row, finding.item) }, finding.place),
    make("td", {}, finding.turn === null ? "" : String(finding.turn)),
    make("td", { class: "where" }, rangeWords(finding)),
    make("td", { class: "says" },
      finding.cause ? make("div", { class: "cause" }, ...marked(finding.cause)) : null,
      make("div", { class: "clip" }, finding.known ? make("span", { class: "known" }, "known") : null, ...marked(finding.message)),
      bothSides(finding, IN_ROW),
      chain(finding, opener)),
    make("td", {}, opener.link(finding)));
  line.finding = finding;
  toggle.onclick = () => {
    const open = toggle.getAttribute("aria-expanded") === "true";
    toggle.setAttribute("aria-expanded", String(!open));
    if (open) line.nextElementSibling.remove();
    else line.after(detail(finding));
  };
  line.addEventListener("click", (event) => {
    if (!event.target.closest("button, a") && getSelection().isCollapsed) toggle.click();
  });
  return line;
}

/** What a finding follows from, or what follows from it, as links; null if it stands alone. */
function chain(finding, opener) {
  if (finding.root) return make("div", { class: "chain" }, "follows from ", opener.anchor(finding.root));
  if (finding.apart) return make("div", { class: "chain" }, "follows from a finding that is not in this page");
  if (!finding.follows?.length) return null;
  const most = 4;
  const links = finding.follows.slice(0, most).flatMap((one, at) => [at ? ", " : "", opener.anchor(one)]);
  const more = finding.follows.length - most;
  return make("div", { class: "chain" }, "explains ", ...links, more > 0 ? ` and ${count(more)} more` : "");
}

function detail(finding) {
  const list = sides(finding);
  const add = (name, ...value) => list.append(make("dt", {}, name), make("dd", {}, ...value));
  if (finding.cause) add("cause", finding.cause);
  if (finding.repair) add("repair", make("code", {}, finding.repair));
  add("place", copyable(placeWords(finding.file, finding.row, finding.item), "the place"));
  add("meaning", copyable(`tito-audit explain ${finding.code}`, "the command"));
  add("all tokens", copyable(showCommand(finding.file, finding.row, finding.item), "the command"));
  const link = copyButton(() => findingLink(finding), "a link to this finding");
  link.classList.add("worded");
  list.append(make("dt", {}, "link"), make("dd", {}, link));
  return make("tr", { class: "detail" }, make("td", { colspan: "8" }, make("p", {}, finding.message), list));
}
