// One rollout, opened over the page at the finding that it was opened for.

function drawLegend() {
  const sample = (classes, piece, words) => make("span", {}, make("span", { class: `token ${classes}`, "aria-hidden": "true" }, piece), ` ${words}`);
  byId("legend").append(
    sample("drift", "tok", "differs"),
    sample("today", "tok", "differs, on the other side"),
    sample("trained", "tok", "trained"),
    sample("hit", "tok", "in a finding"),
    make("span", {}, make("code", {}, "⏎"), " end of line, ", make("code", {}, "·"), " space"));
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

/** The findings of a view, linked. */
const findingsIn = (view) => (Array.isArray(view.findings) ? view.findings : linked(findingsOf(view.findings)));

/** Findings in the order of their roots, the worst first, each followed by what follows from it. */
function grouped(findings) {
  const after = (finding) => [finding, ...(finding.follows ?? []).flatMap(after)];
  return findings.filter((finding) => !finding.root).sort(SORTS.severity).flatMap(after);
}

function viewerApp(index, places) {
  const dialog = byId("viewer");
  const pane = byId("viewer-tokens");
  const numbers = new Map(places.map((place, at) => [place, at]));
  let open = -1; // the rollout that is shown or on its way
  let sections = [];
  let findings = [];
  let current = null; // the finding that is highlighted
  let target = null; // the node that is kept in view
  let opened = null; // what had the focus before
  let reopening = false; // a rollout was asked for after the last was closed, and is not there yet
  let last = ""; // what was asked for last, if it is not in the page
  let byAddress = false; // the address closed it: what it says by the time that the browser tells is newer
  let marking = false; // a token was chosen with the pointer: nothing moves
  let elsewhere = () => {}; // shows a finding whose rollout is not in the page

  function apply(state) {
    const number = numbers.get(state.rollout);
    if (number === undefined) {
      open = -1;
      if (dialog.open) { byAddress = true; dialog.close(); }
      const asked = state.rollout && `${state.rollout} ${state.finding}`;
      if (asked && asked !== last) {
        opened = null; // the focus goes to what is shown instead
        elsewhere(state);
      }
      last = asked;
    } else if (number !== open || !dialog.open) show(number, state);
    else if (!marking && !toToken(state.token)) jump(findings.find((one) => findingKey(one) === state.finding));
    drawOver(state.over);
  }

  async function show(number, { finding: key, token, over }) {
    open = number;
    reopening = !dialog.open;
    if (!dialog.open) opened ??= document.activeElement;
    const [file, row, item] = index[number];
    const view = await source.view(number).catch(failed);
    if (open !== number || !view) return;
    reopening = false;
    findings = grouped(findingsIn(view));
    for (const finding of findings) finding.place = places[number];
    byId("viewer-title").replaceChildren(make("span", { title: placeWords(file, row, item) }, places[number]));
    byId("viewer-copy").replaceChildren(
      copyButton(placeWords(file, row, item), "the place"),
      copyButton(() => location.href, "a link to this view"));
    byId("viewer-copy").lastChild.classList.add("link");
    byId("viewer-line").textContent = [index[number][7] ? `id ${index[number][7]}` : "", many(findings.length + view.more_findings, "finding"),
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
    byId("rollout-number").textContent = `rollout ${count(number + 1)} of ${count(index.length)}`;
    if (!dialog.open) { dialog.showModal(); document.body.classList.add("viewing"); }
    byId("viewer-title").focus();
    fillOver(sections, over);
    drawOver(over);
    jump(findings.find((one) => findingKey(one) === key));
    if (token && !toToken(token)) announce("This token is not shown");
  }

  /** Goes to the token with a key; false if there is none. */
  function toToken(key) {
    const box = key ? sections.map((section) => section.boxes.get(Number(key.split(".")[2]))).find((one) => one?.key === key) : null;
    if (!box) return false;
    clearHere();
    box.classList.add("here");
    focusToken(box);
    return true;
  }

  /** Names a token in the address once it is pointed at or chosen with Enter, so that the link leads to it. */
  function name(box) {
    if (!box?.key || box.key === readState().token) return;
    marking = true;
    setState({ token: box.key }, { step: false });
    marking = false;
  }

  function drawOver(over) {
    for (const section of sections) writeOver(section, over);
    sayOver(sections, over);
    pane.classList.toggle("with-over", over !== "");
  }

  /** Scrolls to the first difference, else to the first token of a finding. */
  function toFirst() {
    target = pane.querySelector(".pair.differs") ?? pane.querySelector(".hit")?.closest(".pair") ?? pane.firstElementChild;
    bring(target, 0.1);
  }

  /** Scrolls the pane so that a node is that far below its top, as a share of its height. */
  function bring(node, share) {
    const inside = pane.getBoundingClientRect();
    pane.scrollTop += node.getBoundingClientRect().top - inside.top - share * inside.height;
  }

  function drawFindings(findings, more, file, row, item) {
    const aside = byId("viewer-findings");
    aside.replaceChildren(make("h3", {}, "Findings of this rollout"));
    for (const finding of findings) {
      const turn = finding.turn === null ? "" : `turn ${finding.turn} `;
      const button = make("button", { type: "button", class: "jump" },
        make("span", { class: "head" }, badge(finding.severity), make("b", {}, finding.code), finding.only ? make("span", { class: "only" }, finding.only) : null, make("span", { class: "quiet" }, turn + rangeWords(finding))),
        make("span", { class: "says" }, finding.message));
      button.finding = finding;
      button.onclick = () => { if (finding === current) jump(finding); else go(finding); };
      aside.append(make("div", { class: finding.root ? "entry after" : "entry" }, button, chain(finding, app)));
    }
    if (more) aside.append(make("p", { class: "quiet" }, `… and ${many(more, "more finding")}`));
    aside.append(make("p", { class: "quiet" }, "In a terminal: ", copyable(showCommand(file, row, item), "the command")));
    aside.scrollTop = 0;
  }

  /** Makes a finding the open one, in the address too; steps within a rollout are none for Back. */
  const go = (finding) => setState({ finding: findingKey(finding), token: "" }, { step: false });

  /** Highlights the tokens of a finding on both sides and brings them into view; without one, shows the first difference. */
  function jump(finding) {
    clearHere();
    current = finding ?? null;
    for (const button of dialog.querySelectorAll(".jump")) {
      button.setAttribute("aria-current", String(button.finding === current));
      if (button.finding === current) keepInside(byId("viewer-findings"), button);
    }
    const at = findings.indexOf(current);
    byId("finding-number").textContent = at < 0 ? many(findings.length, "finding") : `finding ${count(at + 1)} of ${count(findings.length)}`;
    byId("previous-finding").disabled = at <= 0 && open === 0;
    byId("next-finding").disabled = at === findings.length - 1 && open === index.length - 1;
    const section = current && sections.find((one) => hitsOf(one.sequence, [current]).length);
    if (!section) {
      toFirst();
      return;
    }
    for (const node of nodesOf(section, current)) node.classList.add("here");
    target = section.querySelector(".here") ?? section; // in the order of the page: the side that is drawn first
    const token = section.querySelector(".token.here");
    if (token) focusToken(token);
    else bring(target, 0.35);
  }

  /** What stands for a finding: its own tokens, and what the other side holds there; else the token before its place. */
  function nodesOf(section, { start, end }) {
    const other = section.swapped.filter((swap) => (start === end || swap.start === swap.end
      ? swap.start <= end && start <= swap.end
      : swap.start < end && start < swap.end)).flatMap((swap) => swap.nodes);
    const own = [...section.boxes.keys()].filter((at) => start <= at && at < end).map((at) => section.boxes.get(at));
    if (own.length || other.length) return [...own, ...other];
    const near = [...section.boxes.keys()].filter((at) => at <= start).pop() ?? section.boxes.keys().next().value;
    return near === undefined ? [] : [section.boxes.get(near)];
  }

  /** Scrolls a list no further than an entry of it asks for. */
  function keepInside(list, entry) {
    const [inside, at] = [list.getBoundingClientRect(), entry.getBoundingClientRect()];
    if (at.top < inside.top) list.scrollTop += at.top - inside.top - 8;
    else if (at.bottom > inside.bottom) list.scrollTop += Math.min(at.bottom - inside.bottom + 8, at.top - inside.top);
  }

  const clearHere = () => { for (const box of dialog.querySelectorAll(".here")) box.classList.remove("here"); };

  function focusToken(box) {
    target = box;
    for (const other of pane.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    box.tabIndex = 0;
    bring(box, 0.35);
    box.focus({ preventScroll: true });
  }

  function step(by) {
    const all = [...pane.querySelectorAll(".token")];
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

  /** The finding before or after the open one, in the next rollout too. */
  async function neighbour(by) {
    const at = findings.indexOf(current);
    const next = findings[at < 0 && by < 0 ? -1 : at + by];
    if (next) go(next);
    else if (index[open + by]) {
      const view = await source.view(open + by);
      const there = grouped(findingsIn(view)).at(by > 0 ? 0 : -1);
      setState({ rollout: places[open + by], finding: there ? findingKey(there) : "", token: "" }, { step: false });
    }
  }

  function close() {
    const stays = byAddress;
    byAddress = false;
    if (reopening || dialog.open) return; // the browser says later that it closed: another may be on its way, or there
    hideTip();
    document.body.classList.remove("viewing");
    open = -1;
    if (!stays && numbers.has(readState().rollout)) setState({ rollout: "", finding: "", token: "" });
    opened?.focus({ preventScroll: true });
    opened = null;
  }

  const toRollout = (number) => setState({ rollout: places[number], finding: "", token: "" }, { step: false });
  dialog.addEventListener("close", close);
  dialog.addEventListener("cancel", (event) => {
    if (!byId("tip").hidden) { event.preventDefault(); hideTip(); }
  });
  byId("close-viewer").onclick = () => dialog.close();
  byId("previous-rollout").onclick = () => toRollout(open - 1);
  byId("next-rollout").onclick = () => toRollout(open + 1);
  byId("previous-finding").onclick = () => neighbour(-1);
  byId("next-finding").onclick = () => neighbour(1);
  byId("previous-difference").onclick = () => difference(-1);
  byId("next-difference").onclick = () => difference(1);
  pane.addEventListener("scroll", followTip);
  pane.addEventListener("click", (event) => name(event.target.closest(".token")));
  pane.addEventListener("keydown", (event) => { if (event.key === "Enter") name(event.target.closest(".token")); });
  addEventListener("resize", () => { if (dialog.open && target?.isConnected) bring(target, 0.35); });
  drawLegend();

  /** Makes a link open its finding from where it is, as Back's next step. */
  function opening(link, finding) {
    link.onclick = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return; // in a tab of its own
      event.preventDefault();
      if (!dialog.open) opened = link;
      setState({ rollout: finding.place, finding: findingKey(finding), token: "" });
    };
    return link;
  }

  const app = {
    /** A link to the tokens of a finding; null if its rollout is not in the page. */
    link(finding) {
      if (!numbers.has(finding.place)) return null;
      return opening(make("a", { class: "small", href: findingHash(finding), "aria-label": `Tokens of ${finding.code} at ${finding.place}` }, "tokens"), finding);
    },
    /** A link to a finding that another names. */
    anchor(finding) {
      const turn = finding.turn === null ? "" : ` in turn ${finding.turn}`;
      return opening(make("a", { href: findingHash(finding) }, `${finding.code}${turn}`), finding);
    },
    open(number, from) {
      opened = from;
      setState({ rollout: places[number], finding: "", token: "" });
    },
    /** Follows the address from now on; `other` shows findings whose rollouts are not in the page. */
    start(other) {
      elsewhere = other;
      onState(apply);
      if (readState().rollout) apply(readState());
    },
    dialog, step, difference, neighbour, places,
  };
  return app;
}

function rolloutsApp(index, opener) {
  const root = byId("rollouts-app");
  const body = root.querySelector("tbody");
  let shown = index.map((_, number) => number);
  const pages = pager(root, 25, (from, to) => {
    body.replaceChildren(...shown.slice(from, to).map((number) => {
      const [file, row, item, errors, warnings, notes, codes, id] = index[number];
      const button = make("button", { type: "button", class: "small", title: placeWords(file, row, item) }, opener.places[number]);
      button.onclick = () => opener.open(number, button);
      const cell = (of) => make("td", { class: "n" }, of ? count(of) : "");
      return make("tr", {}, make("th", { scope: "row" }, button), id === undefined ? null : make("td", {}, id),
        cell(errors), cell(warnings), cell(notes), make("td", { class: "mono" }, codes.join(" ")));
    }));
  });
  const show = (chosen) => {
    shown = chosen;
    byId("rollouts-shown").textContent = shown.length === index.length ? many(index.length, "rollout") : `${count(shown.length)} of ${many(index.length, "rollout")}`;
    pages.reset(shown.length);
  };
  if (byId("rollout-filters")) rolloutFilters(index, opener.places, show);
  show(shown);
  root.hidden = false;
}
