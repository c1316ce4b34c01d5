// The search through all tokens: an index says which files may hold what is searched, and only these are read.
// `grams.py` made the index, with the same hashes.
const BUCKET = 4096; // hashes in a file of the index
const ASKED = 12; // hashes that a search asks the index for
const HITS = 100; // hits that a search lists before it waits
const AROUND = 60; // characters shown around a hit

const lowered = new TextEncoder();
const slot = (key) => Math.imul(key ^ (key >>> 15), 0x9E3779B1) >>> 12;

/** The hashes of eight consecutive bytes each, or of four where there are fewer. */
function slotsOfText(text) {
  const data = lowered.encode(text.toLowerCase());
  const four = [];
  for (let at = 0; at + 4 <= data.length; at += 1) four.push((data[at] | data[at + 1] << 8 | data[at + 2] << 16 | data[at + 3] << 24) >>> 0);
  if (data.length < 8) return four.map(slot);
  return four.slice(4).map((later, at) => slot(Math.imul((Math.imul(four[at], 0x85EBCA6B) ^ later) >>> 0, 0xC2B2AE35) >>> 0));
}

/** The hashes of pairs of ids, or of the only one. */
function slotsOfIds(ids) {
  const single = (id) => Math.imul(((id >>> 0) + 1) >>> 0, 0x85EBCA6B) >>> 0;
  if (ids.length === 1) return [slot(single(ids[0]))];
  return ids.slice(1).map((id, at) => slot(Math.imul((single(ids[at]) ^ (id >>> 0)) >>> 0, 0xC2B2AE35) >>> 0));
}

/** What is searched for: `{ ids }` or `{ text }`; null if it is nothing. */
function wantedOf(words, as) {
  const ids = words.match(/-?\d+/g)?.map(Number) ?? [];
  const looksLikeIds = ids.length > 0 && /^[\s\d,;[\]()-]+$/.test(words) && (ids.length > 1 || as === "ids");
  if (as === "ids" || (as === "" && looksLikeIds)) return ids.length ? { ids } : null;
  return words === "" ? null : { text: words.toLowerCase() };
}

/** The blocks that may hold it, by the index. */
async function blocksWith(wanted, { blocks: every, width }) {
  const slots = [...new Set(wanted.ids ? slotsOfIds(wanted.ids) : slotsOfText(wanted.text))];
  const step = Math.max(1, slots.length / ASKED);
  const asked = slots.filter((_, at) => Math.floor(at / step) !== Math.floor((at - 1) / step));
  const may = new Uint8Array(width).fill(255);
  const parts = new Map();
  for (const each of asked) {
    const bucket = Math.floor(each / BUCKET);
    if (!parts.has(bucket)) parts.set(bucket, file(`search/${bucket}`).then((part) => part.arrayBuffer()));
  }
  for (const each of asked) {
    const bits = new Uint8Array(await parts.get(Math.floor(each / BUCKET)), (each % BUCKET) * width, width);
    for (let at = 0; at < width; at += 1) may[at] &= bits[at];
  }
  return every.filter((_, at) => may[at >> 3] & (128 >> (at & 7)));
}

const bytesOf = (data) => Uint8Array.from(data.replace("…", "").match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));

/** The text of a stretch, and where each of its tokens begins in it. */
function textOf(sequence, stretch) {
  const known = sequence.known ??= sequence.tokens.map(([, , data]) => bytesOf(data ?? ""));
  const parts = stretch.tokens.map((token) => known[token]);
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) { whole.set(part, at); at += part.length; }
  const text = new TextDecoder().decode(whole);
  /** The token at a place of the text. */
  const tokenAt = (character) => {
    const bytes = lowered.encode(text.slice(0, character)).length; // broken bytes may move this by a token
    let end = 0;
    return Math.max(0, parts.findIndex((part) => { end += part.length; return end > bytes; }));
  };
  return { text, tokenAt };
}

/** The first place of each sequence of a rollout that holds what is searched. */
function hitsIn(view, wanted) {
  const hits = [];
  for (const sequence of view.sequences) {
    for (const stretch of sequence.stretches) {
      const hit = wanted.ids ? idsIn(sequence, stretch, wanted.ids) : textIn(sequence, stretch, wanted.text);
      if (hit === null) continue;
      hits.push({ sequence, position: stretch.start + hit.at, ...hit });
      break;
    }
  }
  return hits;
}

function idsIn(sequence, stretch, ids) {
  const id = (token) => sequence.tokens[stretch.tokens[token]][0];
  for (let at = 0; at + ids.length <= stretch.tokens.length; at += 1) {
    if (!ids.every((wanted, next) => id(at + next) === wanted)) continue;
    const words = (from, to) => stretch.tokens.slice(Math.max(0, from), to).map((token) => sequence.tokens[token][1] ?? sequence.tokens[token][0]).join("│");
    return { at, before: words(at - 6, at), match: words(at, at + ids.length), after: words(at + ids.length, at + ids.length + 6) };
  }
  return null;
}

/** Text on one line, nothing of which takes effect. */
const harmless = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cs}]/gu, (sign) => (sign === "\n" ? "⏎" : sign === "\t" ? "⇥" : `\\u${sign.codePointAt(0).toString(16).padStart(4, "0")}`));

function textIn(sequence, stretch, words) {
  const { text, tokenAt } = textOf(sequence, stretch);
  const at = text.toLowerCase().indexOf(words);
  if (at < 0) return null;
  const end = at + words.length;
  return { at: tokenAt(at), before: harmless(text.slice(Math.max(0, at - AROUND), at)), match: harmless(text.slice(at, end)), after: harmless(text.slice(end, end + AROUND)) };
}

function searchApp({ logs, search }) {
  const [words, as, only, state, list, more, stop] = ["search-words", "search-as", "search-log", "search-state", "search-hits", "search-more", "search-stop"].map(byId);
  const indexes = new Map();
  let running = 0; // the search of now; another one ends it
  only.append(make("option", { value: "" }, "all"), ...logs.map((log, at) => make("option", { value: String(at) }, log.name)));

  const indexOf = (log) => {
    if (!indexes.has(log)) indexes.set(log, json(`${logs[log].files}/index`).then((index) => index.map(entryOf)));
    return indexes.get(log);
  };

  /** All hits, one after the other; between two files the browser may do something else. */
  async function* found(wanted, say) {
    const blocks = await blocksWith(wanted, search);
    const files = blocks.flatMap((block) => Array.from({ length: block.length / 2 }, (_, at) => [block[2 * at], block[2 * at + 1]]))
      .filter(([log]) => only.value === "" || log === Number(only.value));
    for (const [at, [log, shard]] of files.entries()) {
      say(at, files.length);
      const rows = await rowsOf(logs[log].files, shard);
      for (const [number, row] of rows.entries()) {
        for (const hit of hitsIn(row, wanted)) {
          const entry = (await indexOf(log)).find((each) => each.shard === shard && each.at === number);
          yield { log: logs[log], entry, hit };
        }
      }
    }
    say(files.length, files.length);
  }

  function entry({ log, entry: { file: path, row, item, id }, hit }) {
    const at = tokenKey(hit.sequence, hit.position);
    const address = `${log.page}${stateHash({ ...STATE, rollout: placeWords(path.slice(commonFolder([path]).length), row, item), token: at })}`;
    return make("li", {}, make("a", { href: address }, `${log.name}:${row}${item ? `[${item}]` : ""}`), ` ${id ? `${id} · ` : ""}${sequenceWords(hit.sequence)} · token ${count(hit.position)}`,
      make("span", { class: "snippet" }, hit.before, make("mark", {}, hit.match), hit.after));
  }

  async function run() {
    const wanted = wantedOf(words.value.trim(), as.value);
    const own = running += 1;
    list.replaceChildren();
    more.hidden = true;
    if (wanted === null) { state.textContent = ""; stop.hidden = true; return; }
    const what = wanted.ids ? many(wanted.ids.length, "token id") : "the text";
    const begun = performance.now();
    let hits = 0;
    let progress = "";
    stop.hidden = false;
    const tell = () => { state.textContent = `${many(hits, "hit")} for ${what} · ${progress}`; };
    const say = (done, of) => {
      progress = done < of ? `${count(done)} of ${many(of, "file")} read` : `${many(of, "file")} read in ${((performance.now() - begun) / 1000).toFixed(1)} s`;
      tell();
    };
    try {
      for await (const each of found(wanted, say)) {
        if (own !== running) return;
        list.append(entry(each));
        hits += 1;
        if (hits % HITS > 0) continue;
        tell();
        if (!(await asked(own))) return;
      }
    } catch (error) {
      state.textContent = `The search failed: ${error.message}`;
    }
    if (own === running) stop.hidden = true;
    document.documentElement.dataset.searched = String(own);
  }

  /** Waits until more hits are asked for; false if another search begins first. */
  const asked = (own) => new Promise((resolve) => {
    more.hidden = false;
    stop.hidden = true;
    more.onclick = () => { more.hidden = true; stop.hidden = false; resolve(true); };
    searchApp.ends = () => resolve(own === running);
  });

  const again = () => { searchApp.ends?.(); run(); };
  byId("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setState({ q: words.value, by: as.value, log: only.value === "" ? "" : logs[Number(only.value)].name });
  });
  stop.onclick = () => { running += 1; stop.hidden = true; state.textContent += " · stopped"; };
  const follow = (state) => {
    words.value = state.q;
    as.value = ["text", "ids"].includes(state.by) ? state.by : "";
    const log = logs.findIndex((each) => each.name === state.log);
    only.value = log < 0 ? "" : String(log);
    again();
  };
  let last = "";
  const changed = (state) => {
    const key = JSON.stringify([state.q, state.by, state.log]);
    if (key !== last) { last = key; follow(state); }
  };
  onState(changed);
  changed(readState());
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    event.preventDefault();
    words.focus();
    words.select();
  });
}
