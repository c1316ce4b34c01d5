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
async function unpacked(script) {
  if (!script.dataset.packed) return JSON.parse(script.textContent);
  const text = atob(script.textContent);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream(script.dataset.packed));
  return new Response(stream).json();
}

const blocks = (kind) => [...document.querySelectorAll(`script[data-kind="${kind}"]`)];

/** The findings of one block as objects that share the strings of the block. */
function findingsOf(block) {
  const text = (column, at) => block.strings[block[column][at]];
  const side = (column, at) => block[column][at].map((token) => block.tokens[token]);
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
    get recorded() { return side("recorded", at); },
    get canonical() { return side("canonical", at); },
  }));
}

/** All findings of the page, numbered in the order of the log. */
async function allFindings() {
  const parts = await Promise.all(blocks("findings").map(unpacked));
  const all = parts.flatMap(findingsOf);
  all.forEach((finding, at) => { finding.at = at; });
  return all;
}

const placeWords = (file, row, item) => `${file}:${row}${item ? `[${item}]` : ""}`;

function rangeWords(finding) {
  if (finding.start !== finding.end) return `${finding.where} ${finding.start}:${finding.end}`;
  if (finding.where === "log") return "the whole log";
  return finding.where === "row" && finding.code.startsWith("REC") ? "" : `${finding.where} at ${finding.start}`;
}

/** A file name quoted for a shell. */
function quoted(name) {
  return /^[\w@%+=:,./][\w@%+=:,./-]*$/.test(name) ? name : `'${name.replaceAll("'", `'"'"'`)}'`;
}

function showCommand(file, row, item) {
  const { tokenizer, joining } = document.body.dataset;
  const more = (item ? ` --item ${item}` : "") + (tokenizer ? ` -t ${quoted(tokenizer)}` : "");
  return `tito-audit show ${quoted(file)} --row ${row}${more}${joining || ""}`;
}

/** The common folder of all paths, with a slash at its end. */
function commonFolder(paths) {
  if (paths.length === 0) return "";
  let folder = paths[0].slice(0, paths[0].lastIndexOf("/") + 1);
  for (const path of paths) {
    while (!path.startsWith(folder)) folder = folder.slice(0, folder.lastIndexOf("/", folder.length - 2) + 1);
  }
  return folder;
}

const badge = (severity) => make("span", { class: `severity ${SEVERITIES[severity]}` }, SEVERITIES[severity]);

/** Buttons that turn the pages of a table, in every `.turn-pages` of `root`. */
function pager(root, size, draw) {
  let page = 0;
  let total = 0;
  const places = [...root.querySelectorAll(".turn-pages")].map((place) => {
    const words = make("span");
    const steps = { first: "«", previous: "‹", next: "›", last: "»" };
    const buttons = {};
    for (const [name, sign] of Object.entries(steps)) {
      buttons[name] = make("button", { type: "button", "aria-label": `${name} page` }, sign);
    }
    buttons.first.onclick = () => turn(0);
    buttons.previous.onclick = () => turn(page - 1);
    buttons.next.onclick = () => turn(page + 1);
    buttons.last.onclick = () => turn(pages() - 1);
    place.append(buttons.first, buttons.previous, words, buttons.next, buttons.last);
    return { place, words, buttons };
  });
  const pages = () => Math.max(1, Math.ceil(total / size));
  function turn(to) {
    page = Math.min(Math.max(to, 0), pages() - 1);
    for (const { place, words, buttons } of places) {
      place.hidden = pages() === 1;
      words.textContent = `page ${count(page + 1)} of ${count(pages())}`;
      buttons.first.disabled = buttons.previous.disabled = page === 0;
      buttons.next.disabled = buttons.last.disabled = page === pages() - 1;
    }
    draw(page * size, Math.min(total, (page + 1) * size));
  }
  return { reset(number) { total = number; turn(0); } };
}
