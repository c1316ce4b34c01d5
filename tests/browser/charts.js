// Charts that leave their place empty, and bars that touch the frame around them.
const box = (node) => node.getBoundingClientRect();
const bad = [];
for (const figure of document.querySelectorAll(".charts figure")) {
  for (const plot of figure.querySelectorAll(".upright .plot")) {
    const at = box(plot);
    const top = Math.min(...[...plot.querySelectorAll("line")].map((line) => box(line).top));
    if (at.width < 0.7 * box(figure).width) bad.push(`${figure.textContent.trim().slice(0, 20)} is narrow`);
    for (const bar of plot.querySelectorAll(".rect")) {
      const { left, right, top: above } = box(bar);
      if (left <= at.left || right >= at.right || above <= top) bad.push(`${bar.parentElement.textContent} touches`);
    }
  }
}
const rows = new Map();
for (const figure of document.querySelectorAll(".charts figure")) rows.set(box(figure).top, box(figure).right);
for (const right of rows.values()) {
  if (box(document.querySelector(".charts")).right - right > 1) bad.push("a place is empty");
}
return bad;
