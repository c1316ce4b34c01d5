// The findings table: filtered, sorted, one page at a time.
const PER_PAGE = 50;
const NOTHING_CHOSEN = "";

const SORTS = {
  severity: (a, b) => b.severity - a.severity,
  code: (a, b) => (a.code < b.code ? -1 : a.code > b.code ? 1 : 0),
  place: (a, b) => a.fileAt - b.fileAt || a.row - b.row || a.item - b.item,
  turn: (a, b) => (a.turn ?? -1) - (b.turn ?? -1),
  tokens: (a, b) => (a.where < b.where ? -1 : a.where > b.where ? 1 : a.start - b.start || a.end - b.end),
  cause: (a, b) => (a.cause < b.cause ? -1 : a.cause > b.cause ? 1 : 0),
};

/** `[value, count]` pairs, the most frequent first. */
function ranked(values) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
}

const OPTIONS = 1000;

function fillSelect(select, values, words = (value) => value) {
  const found = ranked(values);
  select.append(make("option", { value: NOTHING_CHOSEN }, `all ${count(found.length)}`));
  found.slice(0, OPTIONS).forEach(([value, number], at) => {
    const option = make("option", { value: String(at + 1) }, `${words(value) || "(none)"} · ${count(number)}`);
    option.choice = value;
    select.append(option);
  });
}

const chosen = (select) => (select.value === NOTHING_CHOSEN ? null : select.selectedOptions[0].choice);

/** Text as it is searched: without the signs that make spaces and line ends visible. */
const searchable = (text) => text.toLowerCase().replaceAll("·", " ").replaceAll("⏎", " ");

function prepare(findings) {
  const files = [...new Set(findings.map((finding) => finding.file))];
  const places = new Map(files.map((file, at) => [file, at]));
  const folder = commonFolder(files);
  for (const finding of findings) {
    finding.fileAt = places.get(finding.file);
    finding.place = placeWords(finding.file.slice(folder.length), finding.row, finding.item);
  }
  return folder;
}

/** The text that a search looks through, made at the first search. */
function haystack(finding) {
  if (finding.haystack === undefined) {
    const pieces = (side) => side.map((token) => token[1] ?? "").join("");
    const text = [finding.code, finding.message, finding.cause, finding.place, finding.repair];
    finding.haystack = searchable([...text, pieces(finding.recorded), pieces(finding.canonical)].join("\n"));
  }
  return finding.haystack;
}

function findingsApp(findings, opener) {
  const root = byId("findings-app");
  const form = root.querySelector("form");
  const body = root.querySelector("table.findings tbody");
  const folder = prepare(findings);
  let sort = { by: "severity", down: false };
  let shown = [];
  fillSelect(byId("by-code"), findings.map((finding) => finding.code));
  fillSelect(byId("by-cause"), findings.map((finding) => finding.cause));
  fillSelect(byId("by-file"), findings.map((finding) => finding.file), (file) => file.slice(folder.length));
  byId("by-known").parentElement.hidden = !findings.some((finding) => finding.known);
  const pages = pager(root, PER_PAGE, (from, to) => {
    body.replaceChildren(...shown.slice(from, to).map((finding) => row(finding, opener)));
  });

  function update() {
    const words = searchable(byId("find").value.trim());
    const severities = new Set([...form.elements.severity].filter((box) => box.checked).map((box) => SEVERITIES.indexOf(box.value)));
    const [code, cause, file] = ["by-code", "by-cause", "by-file"].map((id) => chosen(byId(id)));
    const known = byId("by-known").value;
    shown = findings.filter((finding) => severities.has(finding.severity)
      && (code === null || finding.code === code)
      && (cause === null || finding.cause === cause)
      && (file === null || finding.file === file)
      && (known === "" || finding.known === Number(known))
      && (words === "" || haystack(finding).includes(words)));
    const compare = SORTS[sort.by];
    shown.sort((a, b) => (sort.down ? compare(b, a) : compare(a, b)) || SORTS.severity(a, b) || a.at - b.at);
    byId("shown").textContent = shown.length === findings.length
      ? many(findings.length, "finding")
      : `${count(shown.length)} of ${many(findings.length, "finding")}`;
    pages.reset(shown.length);
  }

  function sorted(head) {
    const by = head.dataset.sort;
    sort = { by, down: sort.by === by && !sort.down };
    for (const other of root.querySelectorAll("th[data-sort]")) other.removeAttribute("aria-sort");
    // The first order of severity is descending: the worst first.
    head.setAttribute("aria-sort", sort.down !== (by === "severity") ? "descending" : "ascending");
    update();
  }

  let waiting = 0;
  byId("find").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(update, 120);
  });
  form.addEventListener("change", (event) => { if (event.target.id !== "find") update(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(update));
  for (const head of root.querySelectorAll("th[data-sort]")) head.querySelector("button").onclick = () => sorted(head);
  root.querySelector("th[data-sort=severity]").setAttribute("aria-sort", "descending");
  for (const link of document.querySelectorAll("a[data-code]")) {
    link.addEventListener("click", () => {
      form.reset();
      const option = [...byId("by-code").options].find((one) => one.choice === link.dataset.code);
      if (option) byId("by-code").value = option.value;
      setTimeout(update);
    });
  }
  update();
  root.hidden = false;
}

function row(finding, opener) {
  const toggle = make("button", { type: "button", class: "toggle", "aria-expanded": "false", "aria-label": `Details of ${finding.code} at ${finding.place}` });
  const message = make("div", { class: "clip" }, finding.known ? make("span", { class: "known" }, "known") : null, finding.message);
  const view = opener.button(finding);
  const line = make("tr", {},
    make("td", {}, toggle),
    make("td", {}, badge(finding.severity)),
    make("td", { class: "mono" }, finding.code),
    make("td", { title: placeWords(finding.file, finding.row, finding.item) }, finding.place),
    make("td", {}, finding.turn === null ? "" : String(finding.turn)),
    make("td", { class: "where" }, rangeWords(finding)),
    make("td", {}, make("div", { class: "clip" }, finding.cause)),
    make("td", {}, message),
    make("td", {}, view));
  toggle.onclick = () => {
    const open = toggle.getAttribute("aria-expanded") === "true";
    toggle.setAttribute("aria-expanded", String(!open));
    if (open) line.nextElementSibling.remove();
    else line.after(detail(finding));
  };
  line.addEventListener("click", (event) => {
    if (!event.target.closest("button") && getSelection().isCollapsed) toggle.click();
  });
  return line;
}

function detail(finding) {
  const list = sides(finding);
  const add = (name, ...value) => list.append(make("dt", {}, name), make("dd", {}, ...value));
  if (finding.cause) add("cause", finding.cause);
  if (finding.repair) add("repair", make("code", {}, finding.repair));
  add("meaning", make("code", {}, `tito-audit explain ${finding.code}`));
  add("all tokens", make("code", {}, showCommand(finding.file, finding.row, finding.item)));
  return make("tr", { class: "detail" }, make("td", { colspan: "9" }, make("p", {}, finding.message), list));
}
