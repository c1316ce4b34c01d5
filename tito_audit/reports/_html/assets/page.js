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

async function start() {
  themeButton();
  tokenCards();
  const index = (await Promise.all(blocks("views").map(unpacked)))[0] ?? [];
  const opener = viewerApp(index);
  if (index.length) rolloutsApp(index, opener);
  if (byId("findings-app")) findingsApp(await allFindings(), opener);
  document.documentElement.dataset.ready = "yes";
}

start();
