// Two runs side by side: the same rows of both, and where their tokens and findings differ.
const MOST_EDITS = 2000; // edits that a comparison looks for before it takes the rest as one difference

/** The ranges in which two lists of ids differ: `[start, end, otherStart, otherEnd]`, by Myers' greedy algorithm. */
function differences(a, b) {
  let from = 0;
  while (from < a.length && from < b.length && a[from] === b[from]) from += 1;
  let [endA, endB] = [a.length, b.length];
  while (endA > from && endB > from && a[endA - 1] === b[endB - 1]) { endA -= 1; endB -= 1; }
  const [n, m] = [endA - from, endB - from];
  if (n === 0 || m === 0) return n + m ? [[from, endA, from, endB]] : [];
  const far = new Map([[1, 0]]);
  const trace = [];
  for (let edits = 0; edits <= Math.min(n + m, MOST_EDITS); edits += 1) {
    trace.push(new Map(far));
    for (let k = -edits; k <= edits; k += 2) {
      let x = k === -edits || (k !== edits && far.get(k - 1) < far.get(k + 1)) ? far.get(k + 1) : far.get(k - 1) + 1;
      while (x < n && x - k < m && a[from + x] === b[from + x - k]) x += 1;
      far.set(k, x);
      if (x >= n && x - k >= m) return editsOf(trace, n, m, from);
    }
  }
  return [[from, endA, from, endB]];
}

/** The ranges that the edits of a trace make up, from the first on. */
function editsOf(trace, n, m, from) {
  const steps = [];
  let [x, y] = [n, m];
  for (let edits = trace.length - 1; edits > 0; edits -= 1) {
    const [far, k] = [trace[edits], x - y];
    const before = k === -edits || (k !== edits && far.get(k - 1) < far.get(k + 1)) ? k + 1 : k - 1;
    const [beforeX, beforeY] = [far.get(before), far.get(before) - before];
    while (x > beforeX && y > beforeY) { x -= 1; y -= 1; }
    steps.push([beforeX, x, beforeY, y]);
    [x, y] = [beforeX, beforeY];
  }
  const ranges = [];
  for (const [startA, endA, startB, endB] of steps.reverse()) {
    const last = ranges.at(-1);
    if (last && last[1] === startA + from && last[3] === startB + from) { last[1] = endA + from; last[3] = endB + from; }
    else ranges.push([startA + from, endA + from, startB + from, endB + from]);
  }
  return ranges;
}

/** The first run of shown tokens of a sequence, as ids and as what is known of each; nothing if it has none. */
function firstTokens(sequence) {
  const stretch = sequence?.stretches[0];
  if (!stretch) return { ids: [], start: 0, facts: () => ({}), whole: !sequence?.length };
  return {
    ids: stretch.tokens.map((token) => sequence.tokens[token][0]),
    start: stretch.start,
    facts: (at) => ({
      ...(stretch.logprobs ? { logprob: stretch.logprobs[at] } : {}),
      ...(stretch.columns ? { columns: Object.fromEntries(Object.entries(stretch.columns).map(([name, values]) => [name, values[at]])) } : {}),
      position: stretch.start + at,
    }),
    whole: stretch.start + stretch.tokens.length === sequence.length,
  };
}

/** A sequence of the first run with the tokens that the second has instead; either may be missing. */
function bothSequences(a, b, [ownName, name]) {
  const own = a ?? { ...b, length: 0, stretches: [], swaps: [], tokens: [] };
  const [left, right] = [firstTokens(a), firstTokens(b)];
  const whole = left.whole && right.whole;
  const most = whole ? Infinity : Math.min(left.ids.length, right.ids.length);
  const [idsA, idsB] = [left.ids.slice(0, most), right.ids.slice(0, most)];
  const ranges = differences(idsA, idsB);
  const other = [];
  let [atA, atB] = [0, 0];
  for (const [start, end, , otherEnd] of [...ranges, [idsA.length, idsA.length, idsB.length, idsB.length]]) {
    for (; atA < start; atA += 1, atB += 1) other[atA] = { ...right.facts(atB), of: "both" };
    [atA, atB] = [end, otherEnd];
  }
  const swaps = ranges.map(([start, end, otherStart, otherEnd]) => ({
    start: left.start + start, end: left.start + end, total: otherEnd - otherStart, code: "", against: name, before: 0, after: 0,
    tokens: idsB.slice(otherStart, otherEnd).map((_, at) => own.tokens.length + b.stretches[0].tokens[otherStart + at]),
    facts: idsB.slice(otherStart, otherEnd).map((_, at) => right.facts(otherStart + at)),
  }));
  const stretches = own.stretches.slice(0, 1).map((stretch) => ({ ...stretch, other }));
  if (!stretches.length && swaps.length) stretches.push({ start: 0, tokens: [], other });
  const notes = [a ? "" : "only in the second", b ? "" : "only in the first", whole ? "" : `only the first ${many(most, "shown token")} are compared`];
  return { ...own, own: ownName, stretches, swaps, tokens: [...own.tokens, ...(b?.tokens ?? [])], note: notes.filter(Boolean).join("; "), same_as: swaps.length ? "" : name };
}

/** What the viewer shows of a pair: sequences of both, under the names of their runs, and findings. */
function bothViews(a, b, names) {
  const key = (sequence) => `${sequence.where}.${sequence.turn ?? ""}`;
  const others = new Map((b?.sequences ?? []).map((sequence) => [key(sequence), sequence]));
  const sequences = (a?.sequences ?? []).map((sequence) => bothSequences(sequence, others.get(key(sequence)), names));
  const left = new Set((a?.sequences ?? []).map(key));
  for (const sequence of b?.sequences ?? []) if (!left.has(key(sequence))) sequences.push(bothSequences(null, sequence, names));
  return { messages: (a ?? b).messages, sequences, left_out: 0, more_findings: 0, findings: bothFindings(a, b) };
}

function bothFindings(a, b) {
  const lists = [a, b].map((view) => (view ? linked(findingsOf(view.findings)) : []));
  const keys = lists.map((list) => new Set(list.map(findingKey)));
  for (const finding of lists[0]) finding.only = keys[1].has(findingKey(finding)) ? "both" : "first";
  const alone = lists[1].filter((finding) => !keys[0].has(findingKey(finding)));
  for (const finding of alone) finding.only = "second";
  return [...lists[0], ...alone];
}

/** The rows of a run by what names them: the k-th row with an id is the k-th of the other run. */
function keyed(rows, by) {
  const seen = new Map();
  return new Map(rows.map((row) => {
    const name = by === "id" && row.id ? row.id : `row ${row.row}${row.item ? `[${row.item}]` : ""}`;
    const key = row.part ? `${row.part} · ${name}` : name;
    seen.set(key, (seen.get(key) ?? 0) + 1);
    return [seen.get(key) > 1 ? `${key} #${seen.get(key)}` : key, row];
  }));
}

/** The logs, and the folders that hold several of them, each as a list of logs. */
function runsOf(logs) {
  const runs = new Map(logs.map((log) => [log.name, [log]]));
  const folders = new Map();
  for (const log of logs) {
    for (let at = log.name.lastIndexOf("/"); at > 0; at = log.name.lastIndexOf("/", at - 1)) {
      const folder = log.name.slice(0, at + 1);
      folders.set(folder, [...(folders.get(folder) ?? []), log]);
    }
  }
  for (const [folder, inside] of folders) if (inside.length > 1) runs.set(folder, inside);
  return runs;
}

async function compareApp() {
  const { logs } = await siteData();
  const runs = runsOf(logs);
  const [first, second, by, show] = ["compare-a", "compare-b", "compare-by", "compare-show"].map(byId);
  const state = readState();
  for (const select of [first, second]) select.append(make("option", { value: "" }, "choose"), ...[...runs.keys()].map((name) => make("option", { value: name }, name)));
  first.value = runs.has(state.a) ? state.a : "";
  second.value = runs.has(state.b) ? state.b : "";
  show.value = ["tokens", "findings", "alone"].includes(state.show) ? state.show : "";
  byId("compare-app").hidden = false;
  byId("compare-filters").addEventListener("submit", (event) => event.preventDefault());
  byId("compare-filters").addEventListener("change", (event) => {
    if (event.target === show) return;
    history.pushState(null, "", location.pathname + location.search + stateHash({ ...STATE, a: first.value, b: second.value, by: event.target === by ? by.value : "", show: show.value }));
    location.reload();
  });
  if (!first.value || !second.value) {
    byId("compare-state").textContent = "Choose two logs, or two folders of logs.";
    return;
  }
  const rows = await Promise.all([first.value, second.value].map((name) => rowsOfRun(runs.get(name), name)));
  const ids = rows.map((list) => new Set(list.map((row) => row.id).filter(Boolean)));
  const shared = [...ids[0]].some((id) => ids[1].has(id));
  by.value = ["id", "row"].includes(state.by) ? state.by : shared ? "id" : "row";
  const [left, right] = rows.map((list) => keyed(list, by.value));
  const pairs = [...new Set([...left.keys(), ...right.keys()])].map((key) => pairOf(key, left.get(key), right.get(key)));
  const other = (pair) => pair.alone || pair.a.digest !== pair.b.digest;
  byId("compare-state").textContent = `${many(pairs.filter((pair) => !pair.alone).length, "row")} of both, by ${by.value === "id" ? "id" : "row number"}; `
    + `${count(pairs.filter((pair) => !pair.alone && other(pair)).length)} with other tokens, ${count(pairs.filter((pair) => !pair.alone && pair.findings).length)} with other findings; `
    + `${count(pairs.filter((pair) => !pair.b).length)} only in the first, ${count(pairs.filter((pair) => !pair.a).length)} only in the second`;

  source.view = async (number) => {
    const sides = await Promise.all([pairs[number].a, pairs[number].b].map(async (row) => (row ? (await rowsOf(row.files, row.shard))[row.at] : null)));
    return bothViews(...sides, [first.value, second.value]);
  };
  const index = pairs.map(({ a, b }) => { const row = a ?? b; return [row.file, row.row, row.item, 0, 0, 0, [], row.id]; });
  const viewer = viewerApp(index, pairs.map((pair) => pair.key));
  pairsTable(pairs, viewer, show, other);
  viewer.start(() => {});
  keyboard(null, viewer);
}

async function rowsOfRun(logs, name) {
  const parts = await Promise.all(logs.map(async (log) => (await json(`${log.files}/index`)).map((entry) => ({
    ...entryOf(entry), files: log.files, part: name.endsWith("/") ? log.name.slice(name.length) : "",
  }))));
  return parts.flat();
}

function pairOf(key, a, b) {
  const without = (codes, others) => codes.filter((code) => !others.includes(code));
  const [own, theirs] = [a?.codes ?? [], b?.codes ?? []];
  const counts = (row) => (row ? `${row.errors}.${row.warnings}.${row.notes}` : "");
  return {
    key, a, b, alone: !a || !b, first: without(own, theirs), second: without(theirs, own), both: own.filter((code) => theirs.includes(code)),
    findings: own.join() !== theirs.join() || counts(a) !== counts(b),
  };
}

function pairsTable(pairs, viewer, show, other) {
  const root = byId("pairs-app");
  const body = root.querySelector("tbody");
  let shown = [];
  const tests = { "": () => true, tokens: (pair) => !pair.alone && other(pair), findings: (pair) => !pair.alone && pair.findings, alone: (pair) => pair.alone };
  const codes = (list, noun) => make("td", { class: "codes", "data-noun": noun }, list.join(" "));
  const pages = pager(root, 50, (from, to) => body.replaceChildren(...shown.slice(from, to).map((number) => {
    const pair = pairs[number];
    const button = make("button", { type: "button", class: "small" }, pair.key);
    button.onclick = () => viewer.open(number, button);
    const words = pair.alone ? `only in the ${pair.a ? "first" : "second"}` : other(pair) ? "differ" : "the same";
    return make("tr", {}, make("th", { scope: "row" }, button), make("td", { class: pair.alone ? "alone" : "" }, words), codes(pair.first, "first only"), codes(pair.second, "second only"), codes(pair.both, "both"));
  })));
  const update = () => {
    shown = pairs.flatMap((pair, number) => (tests[show.value](pair) ? [number] : []));
    byId("pairs-shown").textContent = shown.length === pairs.length ? many(pairs.length, "pair") : `${count(shown.length)} of ${many(pairs.length, "pair")}`;
    pages.reset(shown.length);
  };
  show.addEventListener("change", () => { setState({ show: show.value }, { step: false }); update(); });
  update();
  root.hidden = false;
}
