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

/** The options of a select: each value with its count, the most frequent first. */
function fillSelect(select, values, words = (value) => value) {
  const found = ranked(values);
  select.append(make("option", { value: NOTHING_CHOSEN }, `all ${count(found.length)}`));
  for (const [value, number] of found.slice(0, OPTIONS)) addOption(select, value, `${named(words(value))} · ${count(number)}`);
}

function addOption(select, value, words) {
  const option = make("option", { value: String(select.options.length) }, words);
  option.choice = value;
  select.append(option);
  return option;
}

const named = (value) => value || "(none)"; // an empty value can be chosen too

/** The chosen value; "" if all are. */
const chosen = (select) => (select.value === NOTHING_CHOSEN ? "" : named(select.selectedOptions[0].choice));

/** Chooses a value; one that the page does not hold is added, so that the filter never lies. */
function choose(select, value) {
  const option = value === "" ? select.options[0] : [...select.options].slice(1).find((one) => named(one.choice) === value) ?? addOption(select, value, `${value} · not in this page`);
  select.value = option.value;
}

/** Text as it is searched: without the signs that make spaces and line ends visible. */
const searchable = (text) => text.toLowerCase().replaceAll("·", " ").replaceAll("⏎", " ");

/** Gives findings their short places, and the files their order. */
function prepare(findings, folder) {
  const places = new Map();
  for (const finding of findings) {
    if (!places.has(finding.file)) places.set(finding.file, places.size);
    finding.fileAt = places.get(finding.file);
    finding.place = placeWords(finding.file.slice(folder.length), finding.row, finding.item);
  }
}

/** The text that a search looks through, made at the first search. */
function haystack(finding) {
  if (finding.haystack === undefined) {
    const pieces = (side) => side.tokens.map((token) => token[1] ?? "").join("");
    const text = [finding.code, finding.message, finding.cause, finding.place, finding.repair];
    finding.haystack = searchable([...text, ...finding.sides.map(pieces)].join("\n"));
  }
  return finding.haystack;
}

/** Whether a finding is what the filters ask for. */
function filterOf(state) {
  const words = searchable(state.q.trim());
  const severities = state.severity === "" ? SEVERITIES : state.severity.split(",");
  const is = (asked, value) => asked === "" || asked === named(value);
  return (finding) => severities.includes(SEVERITIES[finding.severity])
    && is(state.code, finding.code)
    && is(state.cause, finding.cause)
    && is(state.headline, finding.headline)
    && is(state.log, finding.file)
    && (state.known === "" || finding.known === Number(state.known))
    && (words === "" || haystack(finding).includes(words));
}

/** The findings that a state shows, in its order. */
function chosenFindings(findings, state) {
  const found = findings.filter(filterOf(state));
  const passed = new Set(found);
  const shown = state.fold === "no" ? found : found.filter((finding) => !passed.has(finding.root));
  const [by, down] = orderOf(state);
  const compare = SORTS[by];
  shown.sort((a, b) => (down ? compare(b, a) : compare(a, b)) || SORTS.severity(a, b) || a.at - b.at);
  return { shown, found: found.length };
}

/** `["code", true]` for the order `-code`. */
function orderOf(state) {
  const by = state.sort.replace(/^-/, "");
  return by in SORTS ? [by, state.sort.startsWith("-")] : ["severity", false];
}

function findingsApp(findings, opener, folder) {
  const root = byId("findings-app");
  const form = root.querySelector("form");
  const body = root.querySelector("table.findings tbody");
  const linked = findings.some((finding) => finding.root);
  let shown = [];
  let drawn = "";
  fillSelect(byId("by-code"), findings.map((finding) => finding.code));
  fillSelect(byId("by-headline"), findings.map((finding) => finding.headline));
  fillSelect(byId("by-cause"), findings.map((finding) => finding.cause));
  fillSelect(byId("by-file"), findings.map((finding) => finding.file), (file) => file.slice(folder.length));
  byId("by-known").parentElement.hidden = !findings.some((finding) => finding.known);
  byId("fold").parentElement.hidden = !linked;
  byId("copy-places").replaceChildren(copyButton(() => [...new Set(shown.map((one) => placeWords(one.file, one.row, one.item)))].join("\n"), "the places of these findings"));
  const pages = pager(root, PER_PAGE, (from, to) => {
    body.replaceChildren(...shown.slice(from, to).map((finding) => row(finding, opener)));
  }, (page) => setState({ page: String(page + 1) }));

  function fillForm(state) {
    if (searchable(byId("find").value.trim()) !== searchable(state.q.trim())) byId("find").value = state.q;
    for (const box of form.elements.severity) box.checked = state.severity === "" || state.severity.split(",").includes(box.value);
    choose(byId("by-code"), state.code);
    choose(byId("by-headline"), state.headline);
    choose(byId("by-cause"), state.cause);
    choose(byId("by-file"), state.log);
    byId("by-known").value = ["0", "1"].includes(state.known) ? state.known : "";
    byId("fold").checked = state.fold !== "no";
    const [by, down] = orderOf(state);
    for (const head of root.querySelectorAll("th[data-sort]")) {
      // The first order of severity is descending: the worst first.
      if (head.dataset.sort === by) head.setAttribute("aria-sort", down !== (by === "severity") ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  function update(state) {
    const { rollout, finding, token, over, page, ...filters } = state;
    const at = Number.parseInt(page, 10) - 1 || 0;
    if (JSON.stringify(filters) !== drawn) {
      drawn = JSON.stringify(filters);
      fillForm(state);
      const chosen = chosenFindings(findings, state);
      shown = chosen.shown;
      byId("shown").textContent = shownWords(findings, shown, chosen.found);
      byId("none-shown").hidden = shown.length > 0;
      pages.reset(shown.length, at);
    } else pages.turn(at);
  }

  /** The findings changed only by the controls; what they say becomes the state. */
  function fromForm({ step = true } = {}) {
    const boxes = [...form.elements.severity];
    const severity = boxes.every((box) => box.checked) ? "" : boxes.filter((box) => box.checked).map((box) => box.value).join(",") || "none";
    setState({
      q: byId("find").value, severity, code: chosen(byId("by-code")), cause: chosen(byId("by-cause")),
      headline: chosen(byId("by-headline")), log: chosen(byId("by-file")), known: byId("by-known").value, fold: byId("fold").checked ? "" : "no", page: "1",
    }, { step });
  }

  let waiting = 0;
  byId("find").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => fromForm({ step: false }), 120); // a step for each key would bury the one before
  });
  form.addEventListener("change", (event) => { if (event.target.id !== "find") fromForm(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    setState({ ...STATE, rollout: readState().rollout, finding: readState().finding });
  });
  for (const head of root.querySelectorAll("th[data-sort]")) {
    head.querySelector("button").onclick = () => {
      const [by, down] = orderOf(readState());
      setState({ sort: head.dataset.sort === by && !down ? `-${by}` : head.dataset.sort, page: "1" });
    };
  }
  for (const link of document.querySelectorAll("a[data-code], a[data-headline]")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const { code, headline } = link.dataset;
      setState({ ...STATE, ...(code === undefined ? { headline: named(headline) } : { code }) });
      byId("findings").scrollIntoView();
      byId("findings").focus({ preventScroll: true });
    });
  }
  onState(update);
  update(readState());
  root.hidden = false;

  /** Turns to the page of a finding, opens its row and goes there; filters that hide it are taken back. */
  function reveal(finding) {
    let at = shown.indexOf(finding);
    if (at < 0) {
      setState({ ...STATE, fold: "no", rollout: readState().rollout, finding: readState().finding });
      at = shown.indexOf(finding);
    }
    setState({ page: String(Math.floor(at / PER_PAGE) + 1) }, { step: false });
    const line = [...body.children].find((one) => one.finding === finding);
    const toggle = line.querySelector(".toggle");
    if (toggle.getAttribute("aria-expanded") !== "true") toggle.click();
    toggle.focus({ preventScroll: true });
    line.scrollIntoView({ block: "center", behavior: "instant" });
  }

  /** Goes to the row before or after the one with the focus, on the next page too. */
  function step(by) {
    const lines = [...body.querySelectorAll("tr:not(.detail)")];
    let at = lines.findIndex((line) => line === currentLine());
    at = at < 0 ? (by > 0 ? 0 : lines.length - 1) : at + by;
    const turned = at < 0 || at >= lines.length ? pages.step(by) : false;
    const line = turned ? [...body.querySelectorAll("tr:not(.detail)")].at(by > 0 ? 0 : -1) : lines[Math.min(Math.max(at, 0), lines.length - 1)];
    line?.querySelector(".toggle").focus({ preventScroll: true });
    line?.scrollIntoView({ block: "nearest", behavior: "instant" });
  }

  const currentLine = () => {
    const line = document.activeElement?.closest("table.findings tbody tr");
    return line?.classList.contains("detail") ? line.previousElementSibling : line;
  };
  return { reveal, step, openCurrent: () => currentLine()?.querySelector("a.small")?.click() };
}

/** `93 of 281 findings`; `60 causes, with the 229 findings that they explain`. */
function shownWords(findings, shown, found) {
  if (shown.length < found) return `${many(shown.length, "root finding")}; the other ${count(found - shown.length)} of ${count(found)} follow from them`;
  return found === findings.length ? many(found, "finding") : `${count(found)} of ${many(findings.length, "finding")}`;
}
