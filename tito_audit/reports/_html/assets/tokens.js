// Tokens as boxes, and the card that describes one of them.

/** The box of a token `[id, piece, bytes]`; `facts` is what its card says besides. */
function tokenBox([id, piece, data], classes, facts) {
  const box = make("span", { class: `token ${classes}`, tabindex: "-1" }, piece ?? String(id));
  if (piece !== null && piece !== undefined && /^<[|/a-z｜][^ ]*>$/i.test(piece)) box.classList.add("special");
  box.facts = { id, piece, data, ...facts };
  return box;
}

/** The recorded and canonical tokens of a finding, as two lines of boxes. */
function sides(finding) {
  const list = make("dl");
  for (const [word, name, classes] of [["recorded", "recorded", "drift"], ["canonical", "canonical", "today"]]) {
    const tokens = finding[name];
    if (!tokens.length) continue; // some rules name one side only
    const cell = make("dd");
    for (const token of tokens) cell.append(tokenBox(token, classes, { of: word }));
    cell.append(" ", make("span", { class: "quiet" }, tokens.map((token) => token[0] ?? "?").join(" ")));
    list.append(make("dt", {}, word), cell);
  }
  return list;
}

function factRows(facts) {
  const rows = [["id", facts.id === null ? "unknown" : String(facts.id)]];
  if (facts.piece !== null && facts.piece !== undefined) rows.push(["reads", facts.piece]);
  if (facts.data) rows.push(["bytes", facts.data.replace(/(..)(?=.)/g, "$1 ")]);
  if ("logprob" in facts) rows.push(["logprob", facts.logprob === null ? "unknown" : `${facts.logprob}`]);
  if ("trained" in facts) rows.push(["mask", facts.trained ? "trained" : "not trained"]);
  if ("role" in facts) rows.push(["role", facts.role]);
  if (facts.of) rows.push(["found in", facts.of]);
  if (facts.position !== undefined) rows.push(["position", count(facts.position)]);
  for (const words of facts.hits ?? []) rows.push(["finding", words]);
  return rows;
}

/** Shows the card of a token, below or above it. */
function showTip(box) {
  hideTip();
  const tip = byId("tip");
  const list = make("dl");
  for (const [name, value] of factRows(box.facts)) {
    list.append(make("dt", {}, name), make("dd", { class: name === "bytes" ? "bytes" : "" }, value));
  }
  tip.replaceChildren(list);
  (byId("viewer").open ? byId("viewer") : document.body).append(tip); // a modal dialog covers everything outside of it
  tip.hidden = false;
  tip.of = box;
  box.setAttribute("aria-describedby", "tip");
  placeTip();
}

function placeTip() {
  const tip = byId("tip");
  const at = tip.of.getBoundingClientRect();
  const size = tip.getBoundingClientRect();
  const line = tip.of.closest(".pair.differs")?.getBoundingClientRect();
  // The tokens on the other side are next to or below this one: keep them visible if they are near.
  const near = line && line.bottom - at.bottom < 120 && line.bottom + 6 + size.height <= innerHeight;
  const bottom = near ? line.bottom : at.bottom;
  const below = bottom + 6 + size.height <= innerHeight;
  tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${below ? bottom + 6 : Math.max(4, at.top - size.height - 6)}px`;
}

function hideTip() {
  const tip = byId("tip");
  tip.of?.removeAttribute("aria-describedby");
  tip.of = null;
  tip.hidden = true;
}

/** On scrolling, keeps the card at its token while that is focused and visible, and else hides it. */
function followTip() {
  const box = byId("tip").of;
  if (!box) return;
  const at = box.getBoundingClientRect();
  const around = box.closest("#viewer-tokens")?.getBoundingClientRect() ?? { top: 0, bottom: innerHeight };
  if (box === document.activeElement && at.bottom > around.top && at.top < around.bottom) placeTip();
  else hideTip();
}
