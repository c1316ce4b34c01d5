// Tokens as boxes, and the card that describes one of them.

/** The box of a token `[id, piece, bytes]`; `facts` is what its card says besides. */
function tokenBox([id, piece, data], classes, facts) {
  const box = make("span", { class: `token ${classes}`, tabindex: "-1" }, piece ?? String(id));
  if (piece !== null && piece !== undefined && /^<[|/a-z｜][^ ]*>$/i.test(piece)) box.classList.add("special");
  box.facts = { id, piece, data, ...facts };
  return box;
}

/** The boxes of one side between what both sides hold around it; a side without tokens says so. */
function sideBoxes(finding, { label, tokens }, classes, most = Infinity) {
  const around = (several) => several.map((token) => tokenBox(token, "", { of: "both" }));
  const boxes = tokens.slice(0, most).map((token) => tokenBox(token, classes, { of: label }));
  const more = tokens.length - boxes.length;
  if (!boxes.length) boxes.push(make("span", { class: "nothing" }, "nothing"));
  return [...around(finding.before), ...boxes, ...(more > 0 ? [make("span", { class: "quiet" }, ` … ${count(more)} more`)] : around(finding.after))];
}

/** The sides to draw, with the class of their boxes; a side without tokens only next to one that has some. */
function drawnSides(finding) {
  const both = finding.sides.map((side, at) => ({ side, classes: at ? "today" : "drift" })).filter(({ side }) => side.label !== "");
  const known = both.some(({ side }) => side.tokens.length);
  const empty = finding.before.length + finding.after.length > 0;
  return known ? both.filter(({ side }) => side.tokens.length || empty) : [];
}

/** The sides of a finding in short, for a row of the table: a line of boxes each; null without tokens. */
function bothSides(finding, most) {
  const lines = drawnSides(finding).flatMap(({ side, classes }) => [
    make("span", { class: "side" }, side.label), make("span", {}, ...sideBoxes(finding, side, classes, most))]);
  return lines.length ? make("div", { class: "both" }, ...lines) : null;
}

/** The sides of a finding as lines of boxes, with their ids. */
function sides(finding) {
  const list = make("dl");
  for (const { side, classes } of drawnSides(finding)) {
    const ids = side.tokens.map((token) => token[0] ?? "?").join(" ");
    list.append(make("dt", {}, side.label), make("dd", {}, ...sideBoxes(finding, side, classes), ids ? make("div", { class: "quiet ids" }, ids) : null));
  }
  return list;
}

function factRows(facts) {
  const rows = [["id", facts.id === null ? "unknown" : String(facts.id)]];
  if (facts.piece !== null && facts.piece !== undefined) rows.push(["reads", facts.piece]);
  if (facts.data) rows.push(["bytes", facts.data.replace(/(..)(?=.)/g, "$1 ")]);
  if ("logprob" in facts) rows.push(["logprob", facts.logprob === null ? "unknown" : `${facts.logprob}`]);
  for (const [name, value] of Object.entries(facts.columns ?? {})) rows.push([name, value === null ? "unknown" : `${value}`]);
  if ("trained" in facts) rows.push(["mask", facts.trained ? "trained" : "not trained"]);
  if ("role" in facts) rows.push(["role", facts.role]);
  if (facts.of) rows.push(["side", facts.of]);
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
