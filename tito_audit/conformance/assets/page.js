"use strict";
const body = document.querySelector("#matrix tbody");
document.querySelectorAll("#matrix thead button").forEach((head, column) => {
  let up = column === 0;
  head.addEventListener("click", () => {
    const key = (row) => {
      const cell = row.children[column];
      return column === 0 ? cell.textContent : Number(cell.dataset.sort);
    };
    const rows = [...body.children].sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
    up = !up;
    body.append(...(up ? rows.reverse() : rows));
  });
});
const open = () => {
  const details = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (details) details.open = true;
};
addEventListener("hashchange", open);
open();
