// What runs when the page opens.

/** A button that switches between the system's colours, light and dark. */
function themeButton() {
  const button = byId("theme");
  const themes = ["system", "light", "dark"];
  let at = 0;
  button.onclick = () => {
    at = (at + 1) % themes.length;
    if (at === 0) delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = themes[at];
    button.textContent = `Theme: ${themes[at]}`;
  };
  button.hidden = false;
}

/** Shows a token's card under the pointer, on touch and on focus. */
function tokenCards() {
  const boxOf = (event) => (event.target instanceof Element ? event.target.closest(".token") : null);
  const show = (event) => {
    const box = boxOf(event);
    if (box && box.facts) showTip(box);
    else hideTip();
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("pointerdown", (event) => {
    const box = boxOf(event);
    if (box) box.focus({ preventScroll: true });
  });
  addEventListener("scroll", followTip, { passive: true });
}

/** Goes to a section without touching the address, which holds the filters. */
function sectionLinks() {
  for (const link of document.querySelectorAll('a[href^="#"]:not([data-code], [data-headline])')) {
    link.addEventListener("click", (event) => {
      const section = document.querySelector(link.getAttribute("href"));
      if (!section) return;
      event.preventDefault();
      section.scrollIntoView();
      if (section.tabIndex === -1) section.focus({ preventScroll: true });
    });
  }
}

async function start() {
  themeButton();
  tokenCards();
  sectionLinks();
  copyButtons();
  if (byId("logs-app")) logsApp();
  else if (byId("compare-app")) await compareApp();
  else await logPage();
  document.documentElement.dataset.ready = "yes";
}

/** The page of a log: its findings, and its rollouts token by token. */
async function logPage() {
  const index = await source.index();
  const findings = byId("findings-app") ? await allFindings() : [];
  const folder = commonFolder([...new Set([...index, ...findings].map((one) => one.file ?? one[0]))]);
  const viewer = viewerApp(index, index.map(([file, row, item]) => placeWords(file.slice(folder.length), row, item)));
  if (index.length) rolloutsApp(index, viewer);
  prepare(findings, folder);
  const table = byId("findings-app") ? findingsApp(findings, viewer, folder) : null;
  viewer.start((state) => {
    const finding = findings.find((one) => one.place === state.rollout && findingKey(one) === state.finding);
    if (finding) table.reveal(finding);
  });
  keyboard(table, viewer);
}

start().catch(failed);
