"""Style of all pages, in light and dark mode, and the script that reads values out of their curves."""

STYLE = (
    """
:root { color-scheme: light dark; --ink: #1c2326; --soft: #5c686d; --line: #dde3e5; --page: #f6f8f8; --card: #fff;
  --mark: #e7f4ee; --accent: #0b6e4f; --bad: #b42318; --busy: #9a6700; --grey: #b4bec2;
  --p0: #0072b2; --p1: #d55e00; --p2: #009e73; --p3: #b8549a; --p4: #b58900; --p5: #4a9fd8; --p6: #7a6a58; --p7: #5f5fd3;
  --p8: #3d4a52; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaeb; --soft: #9aa7ac; --line: #323b3f; --page: #14191b; --card: #1b2225;
  --mark: #163a2d; --accent: #4fc79a; --bad: #ff8a7a; --busy: #e3b341; --grey: #4d585d;
  --p0: #4aa8e8; --p1: #f58b4c; --p2: #2cc79b; --p3: #e08bc6; --p4: #e0b93c; --p5: #8fcbf2; --p6: #b8a894; --p7: #9a9af0;
  --p8: #c3ced4; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-behavior: smooth; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 80px; }
h1 { font-size: 32px; line-height: 1.2; letter-spacing: -.01em; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 20px; margin: 44px 0 12px; padding-top: 20px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 0 0 6px; }
p { max-width: 78ch; margin: 10px 0; overflow-wrap: anywhere; }
p.lead { font-size: 19px; line-height: 1.5; } p.faint { color: var(--soft); font-size: 14.5px; }
ul { padding-left: 20px; max-width: 100ch; } li { margin: 4px 0; color: var(--soft); font-size: 14.5px; }
.scroll { overflow: auto; max-height: 680px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  margin: 12px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; vertical-align: bottom; }
th, td { padding: 9px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } td:first-child { font-weight: 600; white-space: nowrap; }
.pairs td:first-child { width: 230px; }
.verbatim td { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 70px; font-weight: 400; }
.wide td:not(:first-child) { white-space: nowrap; } tr.marked { background: var(--mark); }
tr.faint td { color: var(--soft); font-weight: 400; }
figure { margin: 18px 0; padding: 18px; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  min-width: 0; }
figure > svg { max-width: 100%; height: auto; display: block; } figure > h3 { font-weight: 600; }
figcaption { color: var(--soft); font-size: 13.5px; margin-top: 10px; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  font-size: 13px; line-height: 1.45; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: .92em; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--accent); font-weight: 600; font-size: 14.5px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(118px, 1fr)); gap: 12px; margin: 20px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px; min-width: 0; }
.tile b { display: block; font-size: 19px; line-height: 1.25; font-weight: 650; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 12.5px; display: block; overflow-wrap: anywhere; }
.good { color: var(--accent); } .bad { color: var(--bad); } .busy { color: var(--busy); }
.strips { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px; margin: 12px 0; }
.strip { margin: 8px 0 12px; } .strip p { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px;
  margin: 0 0 4px; font-size: 14px; max-width: none; }
.strip p span { color: var(--soft); } .strip svg { display: block; overflow: visible; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; margin-left: 5px; }
.card { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--bad); border-radius: 10px;
  padding: 12px 16px; margin: 12px 0; scroll-margin-top: 16px; } .card:target { outline: 2px solid var(--bad); }
.card dl { display: flex; flex-wrap: wrap; gap: 6px 26px; margin: 0 0 4px; } .card dt { color: var(--soft); font-size: 12px; }
.card dd { margin: 0; font-size: 14.5px; font-variant-numeric: tabular-nums; } .card p { font-size: 14.5px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; margin: 14px 0; }
.grid > figure { margin: 0; padding: 14px 14px 10px; } .grid > figure > svg { width: 100%; }
.choice > input { position: absolute; opacity: 0; pointer-events: none; } .choice > .way { display: none; }
.choice > label { display: inline-block; padding: 3px 14px; border: 1px solid var(--line); border-radius: 99px; font-size: 13.5px;
  margin-right: 6px; cursor: pointer; color: var(--soft); background: var(--card); }
.choice > input:checked + label { background: var(--accent); border-color: var(--accent); color: var(--card); }
.choice > input:focus-visible + label { outline: 2px solid var(--accent); outline-offset: 2px; }
.choice > input:nth-of-type(1):checked ~ .way:nth-of-type(1), .choice > input:nth-of-type(2):checked ~ .way:nth-of-type(2),
.choice > input:nth-of-type(3):checked ~ .way:nth-of-type(3) { display: block; }
.curve { touch-action: pan-y; } .curve .read line { stroke: var(--soft); stroke-dasharray: 2 3; }
.curve .read rect { fill: var(--card); stroke: var(--line); } .curve .read text { fill: var(--ink); font-size: 12px; }
.mark { stroke: var(--bad); } .mark circle, circle.mark { fill: var(--bad); } a:hover .mark { stroke-width: 2; }
@media (max-width: 560px) { main { padding: 24px 14px 60px; } h1 { font-size: 25px; } .tiles { gap: 8px;
  grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); } .tile b { font-size: 18px; } .strips, .card { padding: 12px; } }
@media print { body { background: #fff; } details { display: block; } .scroll { max-height: none; }
  figure, .card, .tile { break-inside: avoid; } }
"""
    + "".join(
        f".s{n} {{ stroke: var(--p{n}); }} .f{n} {{ fill: var(--p{n}); background: var(--p{n}); }} " for n in range(9)
    )
    + (".f-1 { fill: var(--grey); background: var(--grey); }\n")
)

SCRIPT = """
for (const svg of document.querySelectorAll("svg.curve")) {
  const [x0, x1, left, right] = svg.dataset.x.split(",").map(Number), [y0, y1, low, high] = svg.dataset.y.split(",").map(Number);
  const along = svg.dataset.logarithmicX ? Math.log10 : x => x;
  const across = x => left + (x1 > x0 ? (along(x) - x0) / (x1 - x0) : 0) * (right - left);
  const up = y => low + ((svg.dataset.logarithmic ? Math.log10(y) : y) - y0) / (y1 - y0) * (high - low);
  const made = (name, attributes, parent, words) => {
    const found = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) found.setAttribute(key, attributes[key]);
    if (words !== undefined) found.textContent = words;
    return parent.appendChild(found);
  };
  let lines, shown;
  const clear = () => { shown?.remove(); shown = undefined; };
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("pointermove", event => {
    lines ??= [...svg.querySelectorAll("g[data-points]")].map(g =>
      [g, g.dataset.points.split(" ").map(p => p.split(",").map(Number))]);
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const x = x0 + ((event.clientX - box.left) / box.width * view.width - left) / (right - left) * (x1 - x0);
    clear();
    if (x < x0 - (x1 - x0) * .02 || x > x1 + (x1 - x0) * .02) return;
    const near = lines.filter(([, points]) => points.length && points[0].length > 1).map(([g, points]) =>
      [g, points.reduce((a, b) => Math.abs(along(b[0]) - x) < Math.abs(along(a[0]) - x) ? b : a)]);
    if (!near.length) return;
    shown = made("g", {class: "read"}, svg);
    const middle = across(near.reduce((a, b) => Math.abs(along(b[1][0]) - x) < Math.abs(along(a[1][0]) - x) ? b : a)[1][0]);
    made("line", {x1: middle, x2: middle, y1: high, y2: low}, shown);
    const told = near.map(([g, p]) => (g.dataset.title ? g.dataset.title + " " : "") + Number(p[1].toPrecision(5)) + " at "
      + (Math.round(p[0] * 1000) / 1000).toLocaleString("en"));
    const wide = Math.max(...told.map(t => t.length)) * 6.4 + 16;
    const at = Math.max(middle + 10 + wide > view.width ? middle - 10 - wide : middle + 10, 2);
    made("rect", {x: at, y: high + 2, width: wide, height: 17 * told.length + 8, rx: 5}, shown);
    told.forEach((t, n) => made("text", {x: at + 8, y: high + 18 + 17 * n}, shown, t));
    for (const [g, p] of near) made("circle", {cx: across(p[0]), cy: up(p[1]), r: 3.5, fill: getComputedStyle(g).stroke}, shown);
  });
}
"""
