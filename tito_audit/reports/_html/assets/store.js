// The page's data: blocks of JSON, unpacked on demand. Logged text only ever becomes text nodes.
const SEVERITIES = ["note", "warning", "error"];

/** The element with that id. */
const byId = (id) => document.getElementById(id);

/** A new element with attributes and children; a string becomes a text node. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const count = (number) => number.toLocaleString("en-US");
const many = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** The value of one block of data. */
const unpacked = async (script) => (script.dataset.packed ? inflated(script.textContent).json() : JSON.parse(script.textContent));

/** What a text of compressed bytes stands for, as a response that is read as JSON or as bytes. */
function inflated(text) {
  const packed = atob(text);
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at += 1) bytes[at] = packed.charCodeAt(at);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
}

const blocks = (kind) => [...document.querySelectorAll(`script[data-kind="${kind}"]`)];

/** Where the page's data is: in blocks of the page. In a site it is in files beside the page (`files.js`). */
const source = {
  /** The rollouts that can be shown: file, row, item, numbers of errors, warnings and notes, codes, and more in a site. */
  index: async () => (await Promise.all(blocks("views").map(unpacked)))[0] ?? [],
  /** The findings, in chunks. */
  findings: () => Promise.all(blocks("findings").map(unpacked)),
  /** The sequences and findings of a rollout, by its number in the index. */
  view: (number) => unpacked(blocks("view")[number]),
};

/** The findings of one block as objects that share the strings of the block. */
function findingsOf(block) {
  const text = (column, at) => block.strings[block[column][at]];
  const tokens = (column, at) => block[column][at].map((token) => block.tokens[token]);
  return block.severity.map((severity, at) => ({
    severity,
    code: text("code", at),
    file: text("file", at),
    row: block.row[at],
    item: block.item[at],
    turn: block.turn[at],
    where: text("where", at),
    start: block.start[at],
    end: block.end[at],
    cause: text("cause", at),
    message: text("message", at),
    repair: text("repair", at),
    known: block.known[at],
    because: block.because[at],
    headline: text("headline", at),
    /** Both sides, `{ label, tokens }`; what was sampled comes first. */
    get sides() { return ["first", "other"].map((side) => ({ label: text(`${side}_label`, at), tokens: tokens(side, at) })); },
    get before() { return tokens("before", at); },
    get after() { return tokens("after", at); },
  }));
}

/** Links findings: `root` is what one follows from, `follows` what follows from one. */
function linked(findings) {
  for (const finding of findings) {
    const root = finding.because === null ? undefined : findings[finding.because];
    finding.root = root ?? null;
    finding.apart = finding.because !== null && root === undefined; // its root is not in this page
    if (root) (root.follows ??= []).push(finding);
  }
  return findings;
}

/** All findings of the page, numbered in the order of the log. */
async function allFindings() {
  const parts = await source.findings();
  const all = parts.flatMap(findingsOf);
  all.forEach((finding, at) => { finding.at = at; });
  return linked(all);
}

/** Buttons that turn the pages of a table, in every `.turn-pages` of `root`; `ask` may turn them another way. */
function pager(root, size, draw, asked = null) {
  const ask = asked ?? turn;
  let page = 0;
  let total = 0;
  let drawn = -1;
  const pages = () => Math.max(1, Math.ceil(total / size));
  const places = [...root.querySelectorAll(".turn-pages")].map((place) => {
    const words = make("span");
    const steps = { first: "«", previous: "‹", next: "›", last: "»" };
    const buttons = {};
    for (const [name, sign] of Object.entries(steps)) {
      buttons[name] = make("button", { type: "button", "aria-label": `${name} page` }, sign);
    }
    buttons.first.onclick = () => ask(0);
    buttons.previous.onclick = () => ask(page - 1);
    buttons.next.onclick = () => ask(page + 1);
    buttons.last.onclick = () => ask(pages() - 1);
    place.append(buttons.first, buttons.previous, words, buttons.next, buttons.last);
    return { place, words, buttons };
  });
  function turn(to) {
    page = Math.min(Math.max(to, 0), pages() - 1);
    if (page === drawn) return;
    drawn = page;
    for (const { place, words, buttons } of places) {
      place.hidden = pages() === 1;
      words.textContent = `page ${count(page + 1)} of ${count(pages())}`;
      buttons.first.disabled = buttons.previous.disabled = page === 0;
      buttons.next.disabled = buttons.last.disabled = page === pages() - 1;
    }
    draw(page * size, Math.min(total, (page + 1) * size));
  }
  return {
    turn,
    /** Draws another list, from a page on. */
    reset(number, to = 0) {
      total = number;
      drawn = -1;
      turn(to);
    },
    /** Turns by so many pages; false where there are none. */
    step(by) {
      if (page + by < 0 || page + by >= pages()) return false;
      ask(page + by);
      return true;
    },
  };
}
