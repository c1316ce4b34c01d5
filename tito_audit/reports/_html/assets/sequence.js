// One sequence of a rollout: every token of it, next to the tokens that replace it elsewhere.
const LINE = 48; // maximum tokens of a line

/** The values of runs `[value, count]`, one per token. */
function spread(runs) {
  return runs === undefined ? null : runs.flatMap(([value, number]) => Array(number).fill(value));
}

/** The findings in a sequence. */
function hitsOf(sequence, findings) {
  return findings.filter((finding) => finding.only !== "second" && finding.where === sequence.where && (finding.where === "row" || finding.turn === sequence.turn));
}

const sequenceWords = (sequence) => (sequence.turn === null ? "" : `turn ${sequence.turn} · `) + (sequence.where === "row" ? "training row" : sequence.where);

const FIRST_SIDES = ["sampled", "previous call"]; // what was sampled, or what it was sampled after, is drawn first

/** What a sequence holds, in a word, as the head of its column. */
const ownLabel = (sequence) => sequence.own ?? ({ completion: "sampled", row: "training row" })[sequence.where] ?? sequence.where;

/** One sequence as pairs of lines: its own tokens (`left`), and the other side's (`right`), which is drawn first
 * if it was sampled. `boxes` are its own tokens by position, `swapped` the nodes of each place that differs. */
function drawSequence(sequence, findings) {
  const hits = hitsOf(sequence, findings);
  const root = make("section", { class: "sequence" }, make("h3", {}, sequenceWords(sequence)));
  const names = [...new Set(sequence.swaps.map((swap) => swap.against || "other"))];
  const against = names.join(", ");
  const other = names.length > 0 || sequence.same_as !== ""; // where nothing was compared, nothing is claimed
  const words = [many(sequence.length, "token")];
  if (sequence.swaps.length) words.push(`${many(sequence.swaps.length, "place")} ${sequence.swaps.length === 1 ? "differs" : "differ"}${against ? ` from: ${against}` : ""}`);
  if (sequence.same_as) words.push(`the same in: ${sequence.same_as}`);
  if (sequence.note) words.push(sequence.note);
  root.append(make("p", {}, words.join(" · ")));
  const first = names.some((name) => FIRST_SIDES.includes(name));
  const ordered = (left, right) => (first ? [right, left] : [left, right]);
  root.append(make("div", { class: "columns", "aria-hidden": "true" }, make("div"),
    ...ordered(make("div", {}, ownLabel(sequence)), make("div", {}, against || sequence.same_as || "nothing to compare with"))));
  root.boxes = new Map();
  root.swapped = [];
  const swaps = [...sequence.swaps];
  let at = 0;
  let pair = null;

  const begin = (position) => {
    pair = { left: make("div", { class: "left", "data-side": ownLabel(sequence) }), right: make("div", { class: "right", "data-side": against }), size: 0, position, differs: false };
  };
  const finish = () => {
    if (pair === null || (!pair.left.childNodes.length && !pair.right.childNodes.length)) return;
    const kind = pair.differs ? "pair differs" : "pair same";
    root.append(make("div", { class: kind }, make("div", { class: "at" }, String(pair.position)), ...ordered(pair.left, pair.right)));
    pair = null;
  };
  const gap = (number) => {
    finish();
    if (number > 0) root.append(make("div", { class: "gap" }, `… ${many(number, "token")} left out …`));
  };

  function ownBox(stretch, index, swap) {
    const position = stretch.start + index;
    const covering = hits.filter((finding) => finding.start <= position && position < Math.max(finding.end, finding.start + 1));
    const facts = { of: ownLabel(sequence), position, hits: covering.map((finding) => `${SEVERITIES[finding.severity]} ${finding.code}`) };
    if (stretch.logprobs) facts.logprob = stretch.logprobs[index];
    if (stretch.columns) facts.columns = Object.fromEntries(Object.entries(stretch.columns).map(([name, values]) => [name, values[index]]));
    if (stretch.maskOf) facts.trained = stretch.maskOf[index];
    if (stretch.roleOf) facts.role = stretch.roleOf[index];
    const classes = [swap ? "drift" : "", facts.trained ? "trained" : "", covering.length ? "hit" : ""];
    const box = tokenBox(sequence.tokens[stretch.tokens[index]], classes.filter(Boolean).join(" "), facts);
    box.key = tokenKey(sequence, position);
    root.boxes.set(position, box);
    return box;
  }

  function today(swap) {
    const from = swap.against || "other";
    const words = (text) => make("span", { class: "nothing" }, text);
    const empty = swap.start === swap.end ? [words("nothing")] : [];
    pair.left.append(...empty);
    const nodes = swap.tokens.map((token, at) => tokenBox(sequence.tokens[token], "today", { of: from, ...swap.facts?.[at] }));
    if (!nodes.length) nodes.push(words("nothing"));
    root.swapped.push({ start: swap.start, end: swap.end, nodes: [...empty, ...nodes] });
    if (swap.total > swap.tokens.length) nodes.push(words(`… ${many(swap.total - swap.tokens.length, "more token")}`));
    for (const [number, side] of [[swap.before, "before"], [swap.after, "after"]]) {
      if (number) nodes.push(words(`also in place of ${many(number, "token")} ${side} this sequence`));
    }
    pair.right.append(...nodes);
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
        for (; position < Math.min(next.end, end); position += 1) pair.left.append(ownBox(stretch, position - stretch.start, next));
        today(next);
        pair.size += Math.max(next.end - next.start, next.tokens.length, 1);
        if (pair.size >= LINE) finish();
        continue;
      }
      const box = ownBox(stretch, position - stretch.start, null);
      pair.left.append(box);
      if (other) pair.right.append(tokenBox(sequence.tokens[stretch.tokens[position - stretch.start]], "", { of: "both", position, ...stretch.other?.[position - stretch.start] }));
      pair.size += 1;
      position += 1;
      if (pair.size >= LINE || box.textContent.endsWith("⏎")) finish();
    }
    at = end;
  }
  gap(sequence.length - at);
  return root;
}

