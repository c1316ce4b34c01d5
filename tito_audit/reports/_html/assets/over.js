// What is written over the tokens of an opened rollout: mask, logprobs, and what a trainer logged beside them.
const ALL_COLUMNS = "all";
const OWN_COLUMNS = {
  mask: (facts) => ("trained" in facts ? (facts.trained ? "1" : "0") : null),
  logprob: (facts) => ("logprob" in facts ? shortNumber(facts.logprob) : null),
};

const shortNumber = (value) => (value === null || value === undefined ? "–" : Number(value.toPrecision(3)).toString());

/** The columns that some token of these sequences has. */
function columnsOf(sections) {
  const names = new Set();
  for (const { sequence } of sections) {
    for (const stretch of sequence.stretches) {
      if (stretch.trained) names.add("mask");
      if (stretch.logprobs) names.add("logprob");
      for (const name of Object.keys(stretch.columns ?? {})) names.add(name);
    }
  }
  return [...names];
}

/** Fills the list of columns, where the page has one. */
function fillOver(sections, over) {
  const select = byId("over");
  if (!select) return;
  const names = columnsOf(sections);
  const add = (value, words) => make("option", { value }, words);
  select.replaceChildren(add("", "nothing"), ...names.map((name) => add(name, name)), ...(names.length > 1 ? [add(ALL_COLUMNS, "all")] : []));
  select.value = over === ALL_COLUMNS || names.includes(over) ? over : "";
  select.onchange = () => setState({ over: select.value }, { step: false });
}

/** Says in the legend what stands over the tokens, from the top down. */
function sayOver(sections, over) {
  const line = byId("over-words");
  if (line) line.textContent = over === "" ? "" : `over the tokens: ${(over === ALL_COLUMNS ? columnsOf(sections) : [over]).join(", ")}`;
}

/** Writes the values of a column over the tokens of a sequence; "" takes them away. */
function writeOver(section, over) {
  const names = over === ALL_COLUMNS ? columnsOf([section]) : [over];
  const value = (facts, name) => OWN_COLUMNS[name]?.(facts) ?? (facts.columns && name in facts.columns ? shortNumber(facts.columns[name]) : null);
  for (const box of section.querySelectorAll(".left .token, .right .today")) {
    const lines = over === "" ? [] : names.map((name) => value(box.facts, name));
    if (lines.every((line) => line === null)) delete box.dataset.over;
    else box.dataset.over = lines.map((line) => line ?? " ").join("\n");
  }
}
