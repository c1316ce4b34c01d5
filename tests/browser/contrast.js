// Texts whose colour stands out too little from what lies behind them (WCAG AA asks for 4.5).
const numbers = (text) => text.match(/[\d.]+/g).map(Number);
const parsed = (text) => {
  const [red, green, blue, alpha = 1] = numbers(text);
  const scale = text.startsWith("color(srgb") ? 255 : 1;
  return [red * scale, green * scale, blue * scale, alpha];
};
const over = (top, below) => top.slice(0, 3).map((one, at) => one * top[3] + below[at] * (1 - top[3]));
const linear = (one) => (one / 255 <= 0.03928 ? one / 255 / 12.92 : ((one / 255 + 0.055) / 1.055) ** 2.4);
const light = (color) => linear(color[0]) * 0.2126 + linear(color[1]) * 0.7152 + linear(color[2]) * 0.0722;
const behind = (node) => {
  const layers = [];
  for (; node; node = node.parentElement) {
    layers.push(parsed(getComputedStyle(node).backgroundColor));
    if (layers.at(-1)[3] === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
};
const bad = [];
let seen = 0;
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const words = walker.currentNode.data.trim();
  const node = walker.currentNode.parentElement;
  if (!words || !node.checkVisibility() || node.closest(":disabled, option, script, noscript, title")) continue;
  const svg = node.closest("svg");
  const below = behind(svg ? svg.parentElement : node);
  const color = over(parsed(getComputedStyle(node)[svg ? "fill" : "color"]), below);
  const [dark, bright] = [light(color), light(below)].sort((one, other) => one - other);
  const ratio = (bright + 0.05) / (dark + 0.05);
  seen += 1;
  if (ratio < 4.5) bad.push(`${words.slice(0, 30)} ${ratio.toFixed(2)}`);
}
return seen < 20 ? [`only ${seen} texts were looked at`] : [...new Set(bad)];
