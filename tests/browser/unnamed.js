// Controls, regions and tables that nothing names.
const asked = "button, input, select, a, [role=group], [role=img], [role=tooltip], table, section, dialog, aside, nav";
const named = (node) => {
  const by = node.getAttribute("aria-labelledby");
  return node.getAttribute("aria-label")
    || (by && document.getElementById(by)?.textContent.trim())
    || node.labels?.length
    || node.title
    || (["BUTTON", "A"].includes(node.tagName) && node.textContent.trim())
    || (node.tagName === "TABLE" && node.querySelector("caption, thead"))
    || (node.tagName === "SECTION" && node.querySelector("h3"))
    || node.role === "tooltip";
};
return [...document.querySelectorAll(asked)]
  .filter((node) => node.checkVisibility() && !named(node))
  .map((node) => node.outerHTML.slice(0, 80));
