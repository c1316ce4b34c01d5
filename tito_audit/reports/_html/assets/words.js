// How places, ranges and commands are worded.
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

