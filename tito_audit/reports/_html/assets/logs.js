// The list of logs in front of a site.
const LOGS = 50; // a page of the list
const CODES_SHOWN = 6;

const LOG_SORTS = {
  name: (log) => log.name, word: (log) => ["fail", "warn", "info", "none", "pass"].indexOf(log.state), rollouts: (log) => log.rollouts, tokens: (log) => log.tokens,
  errors: (log) => log.counts[0], warnings: (log) => log.counts[1], notes: (log) => log.counts[2],
};

async function logsApp() {
  const data = await siteData();
  const { logs } = data;
  const root = byId("logs-app");
  const body = root.querySelector("table.logs tbody");
  const [find, state, code] = [byId("log-find"), byId("log-state"), byId("log-code")];
  const marked = new Set();
  let order = ["name", false];
  let shown = logs;
  byId("verdicts").textContent = ranked(logs.map((log) => log.word)).map(([word, number]) => `${count(number)} ${word.toLowerCase()}`).join(" · ");
  fillSelect(state, logs.map((log) => log.word));
  fillSelect(code, logs.flatMap((log) => Object.keys(log.codes)));

  const pages = pager(root, LOGS, (from, to) => body.replaceChildren(...shown.slice(from, to).map(line)));

  function line(log) {
    const box = make("input", { type: "checkbox", "aria-label": `Compare ${log.name}` });
    box.checked = marked.has(log);
    box.onchange = () => {
      marked[box.checked ? "add" : "delete"](log);
      byId("compare-two").disabled = marked.size !== 2;
    };
    const codes = Object.entries(log.codes).filter(([, number]) => number);
    const more = codes.length - CODES_SHOWN + log.more_codes;
    const cell = (of, noun) => make("td", { class: "n", "data-noun": of === 1 ? noun : `${noun}s` }, of ? count(of) : "");
    return make("tr", {}, make("td", {}, box), make("th", { scope: "row" }, make("a", { href: log.page }, log.name)),
      make("td", {}, make("span", { class: `word ${log.state}`, title: log.line }, log.word)), cell(log.rollouts, "rollout"), cell(log.tokens, "token"),
      ...log.counts.map((number, at) => cell(number, ["error", "warning", "note"][at])),
      make("td", { class: "codes" }, codes.slice(0, CODES_SHOWN).map(([name, number]) => `${name} ${count(number)}`).join(", ") + (more > 0 ? ` and ${count(more)} more` : "")));
  }

  function update() {
    const words = find.value.trim().toLowerCase();
    const [by, down] = order;
    const value = LOG_SORTS[by];
    shown = logs.filter((log) => log.name.toLowerCase().includes(words)
      && (state.value === NOTHING_CHOSEN || log.word === chosen(state))
      && (code.value === NOTHING_CHOSEN || log.codes[chosen(code)]));
    shown.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (down ? -1 : 1));
    for (const head of root.querySelectorAll("th[data-sort]")) {
      if (head.dataset.sort === by) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    byId("logs-shown").textContent = shown.length === logs.length ? many(logs.length, "log") : `${count(shown.length)} of ${many(logs.length, "log")}`;
    byId("no-logs").hidden = shown.length > 0;
    pages.reset(shown.length);
  }

  byId("log-filters").addEventListener("input", update);
  byId("log-filters").addEventListener("submit", (event) => event.preventDefault());
  byId("log-filters").addEventListener("reset", () => setTimeout(update));
  for (const head of root.querySelectorAll("th[data-sort]")) {
    const numbers = head.classList.contains("n"); // the largest first
    head.querySelector("button").onclick = () => {
      order = [head.dataset.sort, order[0] === head.dataset.sort ? !order[1] : numbers];
      update();
    };
  }
  byId("compare-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const [a, b] = logs.filter((log) => marked.has(log));
    location.href = `compare.html${stateHash({ ...STATE, a: a.name, b: b.name })}`;
  });
  update();
  searchApp(data);
  root.hidden = false;
}
