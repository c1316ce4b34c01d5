// The data of a site: files that the page loads when it needs them, each a script that hands over its value.
// A page from disk may read no other file.
const KEPT = 6; // files of rows that stay in memory

const place = document.body.dataset;
const loading = new Map(); // by name: the promise of a file on its way, and what ends it
globalThis.titoAudit = (name, packed) => loading.get(name)?.end(packed);

/** A file of the site, as a response; the name is its path below the folder of data, without `.js`. */
async function file(name) {
  if (!loading.has(name)) {
    const one = {};
    one.promise = new Promise((resolve, reject) => {
      const script = make("script", { src: `${place.root}${place.data}/${name}.js` });
      const ending = (done) => (value) => { loading.delete(name); script.remove(); done(value); };
      one.end = ending(resolve);
      script.onerror = ending(() => reject(new Error(`${name}.js cannot be loaded. If the site was updated, reload this page.`)));
      loading.set(name, one);
      document.head.append(script);
    });
  }
  return inflated(await loading.get(name).promise);
}

const json = async (name) => (await file(name)).json();

const recent = new Map();

/** The rows of a file; the files asked for last stay in memory. */
function rowsOf(files, number) {
  const name = `${files}/rows-${number}`;
  const rows = recent.get(name) ?? json(name);
  recent.delete(name);
  recent.set(name, rows);
  rows.catch(() => recent.delete(name));
  while (recent.size > KEPT) recent.delete(recent.keys().next().value);
  return rows;
}

/** What an entry of a log's index holds, by name. */
const entryOf = ([file, row, item, errors, warnings, notes, codes, id, digest, shard, at]) =>
  ({ file, row, item, errors, warnings, notes, codes, id, digest, shard, at });

if (place.files) {
  let index = [];
  source.index = async () => { index = await json(`${place.files}/index`); return index; };
  source.findings = async () => {
    const { findings } = await unpacked(blocks("files")[0]);
    return Promise.all(Array.from({ length: findings }, (_, number) => json(`${place.files}/findings-${number}`)));
  };
  source.view = async (number) => {
    const { shard, at } = entryOf(index[number]);
    return (await rowsOf(place.files, shard))[at];
  };
}

/** The list of logs, and what the search has to know. */
const siteData = () => unpacked(blocks("site")[0]);

/** Filters the rollouts of a log by what they are called and by their findings. */
function rolloutFilters(index, places, show) {
  const [find, code] = [byId("rollout-find"), byId("rollout-code")];
  fillSelect(code, index.flatMap((entry) => entryOf(entry).codes));
  const clean = addOption(code, null, "no finding");
  const filter = () => {
    const words = find.value.trim().toLowerCase();
    const wanted = code.value === NOTHING_CHOSEN ? undefined : code.selectedOptions[0].choice;
    show(index.flatMap((entry, number) => {
      const { id, codes } = entryOf(entry);
      const is = wanted === undefined || (code.selectedOptions[0] === clean ? codes.length === 0 : codes.includes(wanted));
      return is && `${places[number]}\n${id}`.toLowerCase().includes(words) ? [number] : [];
    }));
  };
  find.addEventListener("input", filter);
  code.addEventListener("change", filter);
  byId("rollout-filters").addEventListener("submit", (event) => event.preventDefault());
}
