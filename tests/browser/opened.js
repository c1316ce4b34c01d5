// Opens findings one after the other by their links, and says of each where its highlighted tokens are.
const [links, done] = arguments;
const seen = async (link) => {
  location.hash = link;
  const asked = new URLSearchParams(link.slice(1));
  const viewer = document.getElementById("viewer");
  const shown = () => viewer.open && viewer.querySelector("#viewer-title").textContent === asked.get("rollout")
    && viewer.querySelector(".jump[aria-current=true]")?.finding.code === asked.get("finding").split(".")[0];
  for (let tries = 0; tries < 500 && !shown(); tries += 1) await new Promise((again) => setTimeout(again, 4));
  await new Promise((again) => requestAnimationFrame(() => requestAnimationFrame(again)));
  if (!shown()) return "was not opened";
  const pane = document.getElementById("viewer-tokens").getBoundingClientRect();
  const boxes = [...viewer.querySelectorAll("#viewer-tokens .here")];
  if (!boxes.length) return "highlights nothing";
  const at = boxes[0].getBoundingClientRect();
  const inside = at.height > 0 && at.width > 0 && at.top >= Math.max(0, pane.top) && at.bottom <= Math.min(innerHeight, pane.bottom)
    && at.left >= Math.max(0, pane.left) && at.left < Math.min(innerWidth, pane.right);
  return inside ? "" : `is at ${Math.round(at.left)},${Math.round(at.top)} outside of ${Math.round(pane.left)},${Math.round(pane.top)} to ${Math.round(pane.right)},${Math.round(pane.bottom)}`;
};
(async () => {
  const bad = [];
  for (const link of links) {
    const words = await seen(link);
    if (words) bad.push(`${link} ${words}`);
  }
  done(bad);
})();
