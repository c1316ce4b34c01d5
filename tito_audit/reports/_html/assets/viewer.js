// One rollout: every recorded token, and what would be written in its place today.
const LINE = 48; // maximum tokens of a line

/** The values of runs `[value, count]`, one per token. */
function spread(runs) {
  return runs === undefined ? null : runs.flatMap(([value, number]) => Array(number).fill(value));
}

/** The findings in a sequence. */
function hitsOf(sequence, findings) {
  return findings.filter((finding) => finding.where === sequence.where && (finding.where === "row" || finding.turn === sequence.turn));
}

const sequenceWords = (sequence) => (sequence.turn === null ? "" : `turn ${sequence.turn} · `) + (sequence.where === "row" ? "training row" : sequence.where);

/** One sequence as pairs of lines, recorded and canonical; its `boxes` are the recorded tokens by position. */
function drawSequence(sequence, findings) {
  const hits = hitsOf(sequence, findings);
  const root = make("section", { class: "sequence" }, make("h3", {}, sequenceWords(sequence)));
  const names = [...new Set(sequence.swaps.map((swap) => swap.against || "canonical"))];
  const against = names.join(", ");
  const other = names.length > 0 || sequence.same_as !== ""; // where nothing was compared, nothing is claimed
  const words = [many(sequence.length, "token")];
  if (sequence.swaps.length) words.push(`${many(sequence.swaps.length, "place")} ${sequence.swaps.length === 1 ? "differs" : "differ"}${against ? ` from: ${against}` : ""}`);
  if (sequence.same_as) words.push(`the same in: ${sequence.same_as}`);
  if (sequence.note) words.push(sequence.note);
  root.append(make("p", {}, words.join(" · ")));
  root.append(make("div", { class: "columns", "aria-hidden": "true" }, make("div"), make("div", {}, "recorded"), make("div", {}, against || sequence.same_as || "nothing to compare with")));
  root.boxes = new Map();
  const swaps = [...sequence.swaps];
  let at = 0;
  let pair = null;

  const begin = (position) => {
    pair = { left: make("div", { class: "left" }), right: make("div", { class: "right" }), size: 0, position, differs: false };
  };
  const finish = () => {
    if (pair === null || (!pair.left.childNodes.length && !pair.right.childNodes.length)) return;
    const kind = pair.differs ? "pair differs" : "pair same";
    root.append(make("div", { class: kind }, make("div", { class: "at" }, String(pair.position)), pair.left, pair.right));
    pair = null;
  };
  const gap = (number) => {
    finish();
    if (number > 0) root.append(make("div", { class: "gap" }, `… ${many(number, "token")} left out …`));
  };

  function recordedBox(stretch, index, swap) {
    const position = stretch.start + index;
    const covering = hits.filter((finding) => finding.start <= position && position < Math.max(finding.end, finding.start + 1));
    const facts = { of: "recorded", position, hits: covering.map((finding) => `${SEVERITIES[finding.severity]} ${finding.code}`) };
    if (stretch.logprobs) facts.logprob = stretch.logprobs[index];
    if (stretch.maskOf) facts.trained = stretch.maskOf[index];
    if (stretch.roleOf) facts.role = stretch.roleOf[index];
    const worst = Math.max(-1, ...covering.map((finding) => finding.severity));
    const classes = [swap ? "drift" : "", facts.trained ? "trained" : "", worst >= 0 ? `hit-${SEVERITIES[worst]}` : ""];
    const box = tokenBox(sequence.tokens[stretch.tokens[index]], classes.filter(Boolean).join(" "), facts);
    root.boxes.set(position, box);
    return box;
  }

  function today(swap) {
    const cell = pair.right;
    const from = swap.against || "canonical";
    for (const token of swap.tokens) cell.append(tokenBox(sequence.tokens[token], "today", { of: from }));
    const nothing = swap.start === swap.end ? "nothing recorded here" : "";
    if (nothing) pair.left.append(make("span", { class: "nothing" }, nothing));
    if (!swap.tokens.length) cell.append(make("span", { class: "nothing" }, "nothing"));
    if (swap.total > swap.tokens.length) cell.append(make("span", { class: "nothing" }, `… ${many(swap.total - swap.tokens.length, "more token")}`));
    for (const [number, side] of [[swap.before, "before"], [swap.after, "after"]]) {
      if (number) cell.append(make("span", { class: "nothing" }, `also replaces ${many(number, "token")} ${side} this sequence`));
    }
    pair.differs = true;
  }

  for (const stretch of sequence.stretches) {
    gap(stretch.start - at);
    const end = stretch.start + stretch.tokens.length;
    stretch.maskOf = spread(stretch.trained);
    stretch.roleOf = spread(stretch.roles);
    while (swaps.length && swaps[0].start < stretch.start && swaps[0].end <= stretch.start) swaps.shift();
    let position = stretch.start;
    while (true) {
      const next = swaps[0];
      const here = next && next.start <= position && (position < end || next.start === next.end);
      if (!here && position >= end) break;
      if (pair === null) begin(position);
      if (here) {
        swaps.shift();
        for (; position < Math.min(next.end, end); position += 1) pair.left.append(recordedBox(stretch, position - stretch.start, next));
        today(next);
        pair.size += Math.max(next.end - next.start, next.tokens.length, 1);
        if (pair.size >= LINE) finish();
        continue;
      }
      const box = recordedBox(stretch, position - stretch.start, null);
      pair.left.append(box);
      if (other) pair.right.append(tokenBox(sequence.tokens[stretch.tokens[position - stretch.start]], "", { of: "both", position }));
      pair.size += 1;
      position += 1;
      if (pair.size >= LINE || box.textContent.endsWith("⏎")) finish();
    }
    at = end;
  }
  gap(sequence.length - at);
  return root;
}

function drawLegend() {
  const sample = (classes, piece, words) => make("span", {}, make("span", { class: `token ${classes}`, "aria-hidden": "true" }, piece), ` ${words}`);
  byId("legend").append(
    sample("drift", "tok", "recorded, but replaced"),
    sample("today", "tok", "what replaces it"),
    sample("trained", "tok", "trained"),
    sample("hit-error", "tok", "in a finding"),
    make("span", {}, make("code", {}, "⏎"), " end of line, ", make("code", {}, "·"), " space"));
}

function viewerApp(index) {
  const dialog = byId("viewer");
  const pane = byId("viewer-tokens");
  const scripts = blocks("view");
  const folder = commonFolder(index.map(([file]) => file));
  const numbers = new Map(index.map(([file, row, item], at) => [placeWords(file, row, item), at]));
  let open = -1;
  let sections = [];
  let opened = null;
  let reopening = false; // a rollout was asked for after the last was closed, and is not there yet

  async function show(number, finding) {
    open = number;
    reopening = !dialog.open;
    const [file, row, item, ...counts] = index[number];
    const view = await unpacked(scripts[number]);
    if (open !== number) return;
    reopening = false;
    const findings = findingsOf(view.findings);
    byId("viewer-title").textContent = placeWords(file.slice(folder.length), row, item);
    byId("viewer-title").title = placeWords(file, row, item);
    byId("viewer-line").textContent = [many(findings.length + view.more_findings, "finding"),
      `${many(view.messages.length, "message")}${view.messages.length ? `: ${summed(view.messages)}` : ""}`,
      view.left_out ? `${many(view.left_out, "sequence")} left out` : ""].filter(Boolean).join(" · ");
    sections = view.sequences.map((sequence) => drawSequence(sequence, findings));
    sections.forEach((section, at) => { section.sequence = view.sequences[at]; });
    pane.replaceChildren(...(sections.length ? sections : [make("p", { class: "empty" }, "This rollout has no token sequences.")]));
    const first = pane.querySelector(".drift, .today, .token");
    if (first) first.tabIndex = 0;
    drawFindings(findings, view.more_findings, file, row, item);
    byId("previous-rollout").disabled = number === 0;
    byId("next-rollout").disabled = number === index.length - 1;
    pane.scrollTop = 0;
    if (!dialog.open) { dialog.showModal(); document.body.classList.add("viewing"); }
    byId("viewer-title").focus();
    const same = finding && findings.find((one) => one.code === finding.code && one.where === finding.where && one.turn === finding.turn && one.start === finding.start && one.end === finding.end);
    if (same) jump(same);
    else toFirst();
  }

  /** Scrolls to the first difference, else to the first token of a finding. */
  function toFirst() {
    const first = pane.querySelector(".pair.differs") ?? pane.querySelector("[class*='hit-']")?.closest(".pair");
    if (first) first.scrollIntoView({ block: "start", behavior: "instant" });
  }

  /** The roles of messages, runs counted: `system, user, assistant × 2`. */
  function summed(roles) {
    const most = 12;
    const runs = [];
    for (const role of roles) {
      if (runs.length && runs.at(-1)[0] === role) runs.at(-1)[1] += 1;
      else runs.push([role, 1]);
    }
    const words = runs.slice(0, most).map(([role, number]) => (number > 1 ? `${role} × ${number}` : role));
    return words.join(", ") + (runs.length > most ? ` and ${count(runs.length - most)} more` : "");
  }

  function drawFindings(findings, more, file, row, item) {
    const aside = byId("viewer-findings");
    aside.replaceChildren(make("h3", {}, "Findings of this rollout"));
    for (const finding of findings) {
      const turn = finding.turn === null ? "" : `turn ${finding.turn} `;
      const button = make("button", { type: "button", class: "jump" },
        make("span", { class: "head" }, badge(finding.severity), make("b", {}, finding.code), make("span", { class: "quiet" }, turn + rangeWords(finding))),
        make("span", { class: "says" }, finding.message));
      button.finding = finding;
      button.onclick = () => jump(finding);
      aside.append(button);
    }
    if (more) aside.append(make("p", { class: "quiet" }, `… and ${many(more, "more finding")}`));
    aside.append(make("p", { class: "quiet" }, "In a terminal: ", make("code", {}, showCommand(file, row, item))));
    aside.scrollTop = 0;
  }

  function jump(finding) {
    for (const button of dialog.querySelectorAll(".jump")) button.setAttribute("aria-current", String(button.finding === finding));
    const section = sections.find((one) => hitsOf(one.sequence, [finding]).length);
    if (!section) return;
    clearHere();
    const inside = [...section.boxes.keys()].filter((at) => finding.start <= at && at < Math.max(finding.end, finding.start + 1));
    for (const at of inside) section.boxes.get(at).classList.add("here");
    const target = inside.length ? section.boxes.get(inside[0]) : nearest(section, finding.start);
    if (inside.length) focusToken(target);
    else target.scrollIntoView({ block: "center", behavior: "instant" });
  }

  function nearest(section, position) {
    const before = [...section.boxes.keys()].filter((at) => at <= position).pop();
    return before === undefined ? section : section.boxes.get(before);
  }

  const clearHere = () => { for (const box of dialog.querySelectorAll(".here")) box.classList.remove("here"); };
  const tokens = () => [...pane.querySelectorAll(".token")];

  function focusToken(box) {
    for (const other of pane.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    box.tabIndex = 0;
    box.scrollIntoView({ block: "center", behavior: "instant" });
    box.focus({ preventScroll: true });
  }

  function step(by) {
    const all = tokens();
    const at = all.indexOf(document.activeElement);
    const box = all[at + by];
    if (at >= 0 && box) {
      for (const other of pane.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
      box.tabIndex = 0;
      box.focus();
    }
  }

  function difference(by) {
    const all = [...pane.querySelectorAll(".pair.differs")];
    if (!all.length) return;
    const now = document.activeElement.closest?.(".pair.differs");
    const before = now ? all.indexOf(now) : by > 0 ? -1 : all.length;
    const pair = all[Math.min(Math.max(before + by, 0), all.length - 1)];
    clearHere();
    focusToken(pair.querySelector(".drift") ?? pair.querySelector(".today") ?? pair.querySelector(".token"));
  }

  function close() {
    if (reopening) return; // the browser says later that it closed, and by then another is on its way
    hideTip();
    document.body.classList.remove("viewing");
    open = -1;
    if (location.hash.startsWith("#rollout-")) history.replaceState(null, "", location.pathname + location.search);
    opened?.focus();
    opened = null;
  }

  const go = (number, finding) => {
    history.replaceState(null, "", `#rollout-${number}`);
    return show(number, finding);
  };
  dialog.addEventListener("close", close);
  dialog.addEventListener("cancel", (event) => {
    if (!byId("tip").hidden) { event.preventDefault(); hideTip(); }
  });
  byId("close-viewer").onclick = () => dialog.close();
  byId("previous-rollout").onclick = () => go(open - 1);
  byId("next-rollout").onclick = () => go(open + 1);
  byId("previous-difference").onclick = () => difference(-1);
  byId("next-difference").onclick = () => difference(1);
  dialog.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inTokens = document.activeElement.classList.contains("token");
    if (inTokens && event.key === "ArrowRight") step(1);
    else if (inTokens && event.key === "ArrowLeft") step(-1);
    else if (event.key === "n") difference(1);
    else if (event.key === "p") difference(-1);
    else return;
    event.preventDefault();
  });
  pane.addEventListener("scroll", followTip);
  drawLegend();
  const fromHash = () => {
    const asked = /^#rollout-(\d+)$/.exec(location.hash);
    if (asked && Number(asked[1]) < index.length) show(Number(asked[1]));
    else if (dialog.open) dialog.close();
  };
  addEventListener("hashchange", fromHash);
  fromHash();
  return {
    /** A button that opens the rollout of a finding; null if it is not in the page. */
    button(finding) {
      const number = numbers.get(placeWords(finding.file, finding.row, finding.item));
      if (number === undefined) return null;
      const button = make("button", { type: "button", class: "small", "aria-label": `Tokens of ${finding.place}` }, "tokens");
      button.onclick = () => { opened = button; go(number, finding); };
      return button;
    },
    open(number, from) { opened = from; return go(number); },
  };
}

function rolloutsApp(index, opener) {
  const root = byId("rollouts-app");
  const folder = commonFolder(index.map(([file]) => file));
  const body = root.querySelector("tbody");
  const pages = pager(root, 25, (from, to) => {
    body.replaceChildren(...index.slice(from, to).map(([file, row, item, errors, warnings, notes, codes], at) => {
      const button = make("button", { type: "button", class: "small", title: placeWords(file, row, item) }, placeWords(file.slice(folder.length), row, item));
      button.onclick = () => opener.open(from + at, button);
      const cell = (number) => make("td", { class: "n" }, number ? count(number) : "");
      return make("tr", {}, make("th", { scope: "row" }, button), cell(errors), cell(warnings), cell(notes), make("td", { class: "mono" }, codes.join(" ")));
    }));
  });
  byId("rollouts-shown").textContent = many(index.length, "rollout");
  pages.reset(index.length);
  root.hidden = false;
}
