// The state of the page, kept in the address: filters, order, page, the open rollout and finding.
// Back and forward, a reload and a pasted link all lead to the same view.
const STATE = { q: "", severity: "", code: "", cause: "", headline: "", log: "", known: "", fold: "", sort: "severity", page: "1", rollout: "", finding: "", token: "", over: "", a: "", b: "", by: "", show: "" };

const listeners = [];

/** The state that the address holds; what it does not name has its default. */
function readState() {
  const asked = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(Object.entries(STATE).map(([name, value]) => [name, asked.get(name) ?? value]));
}

/** The fragment of an address that holds a state; empty if everything has its default. */
function stateHash(state) {
  const named = Object.entries(state).filter(([name, value]) => value !== STATE[name]);
  // Only what would end or change an address is escaped, so that people can read the rest.
  const kept = (text) => encodeURIComponent(text).replace(/%(2F|3A|2C|5B|5D)/g, decodeURIComponent);
  return named.length ? `#${named.map(([name, value]) => `${name}=${kept(value)}`).join("&")}` : "";
}

/** Changes the state; `step` makes it a step that the browser's Back undoes. */
function setState(changes, { step = true } = {}) {
  const next = { ...readState(), ...changes };
  const address = location.pathname + location.search + stateHash(next);
  if (address === location.pathname + location.search + location.hash) return;
  history[step ? "pushState" : "replaceState"](null, "", address);
  for (const listener of listeners) listener(next);
}

/** Calls `listener` with each new state, wherever it comes from. */
function onState(listener) {
  listeners.push(listener);
}

addEventListener("hashchange", () => {
  const state = readState();
  for (const listener of listeners) listener(state);
});

/** What names a finding within its rollout: `TOK101.0.completion.12-14`. */
const findingKey = (finding) => `${finding.code}.${finding.turn ?? ""}.${finding.where}.${finding.start}-${finding.end}`;

/** What names a token within its rollout, by turn, sequence and position: `3.completion.120`. */
const tokenKey = (sequence, position) => `${sequence.turn ?? ""}.${sequence.where}.${position}`;

/** The fragment that opens a finding, next to the filters of now. */
const findingHash = (finding) => stateHash({ ...readState(), rollout: finding.place, finding: findingKey(finding), token: "" });

/** The address of a finding by itself, without the filters of now: to send to someone. */
const findingLink = (finding) => location.href.split("#")[0] + stateHash({ ...STATE, rollout: finding.place, finding: findingKey(finding) });
