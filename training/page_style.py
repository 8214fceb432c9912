"""How the page of a run looks: one sheet for light and dark, a phone and a wide screen.

Colours follow those of the documentation's pictures: blue and red-orange, light blue and amber,
which people with a weakness for red or green tell apart by lightness too.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --back: #ffffff; --panel: #f5f7f9; --text: #1a1f24; --muted: #55606b; --rule: #d5dbe1;
  --a: #2f6aa8; --b: #c2452d; --c: #8fb4d9; --d: #dc9a43; --warn: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14181c; --panel: #1c2227; --text: #e6eaee; --muted: #a0abb6; --rule: #39424b;
    --a: #6aa9e4; --b: #f2785c; --c: #34608c; --d: #e9b565; --warn: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 76rem; padding: 1.5rem 1.25rem 4rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans",
  sans-serif;
}
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 0.75rem; }
h3 { font-size: 1rem; margin: 0; } h3.next { margin-top: 1.5rem; }
p { margin: 0.4rem 0; max-width: 46rem; overflow-wrap: anywhere; }
.muted, figcaption span, .axis, .plot span, .note { color: var(--muted); font-size: 0.875rem; }
.warn { color: var(--warn); }
dl {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: 0.75rem;
  margin: 1.5rem 0 0;
}
dl div { background: var(--panel); border-radius: 0.5rem; padding: 0.6rem 0.7rem; }
dt { color: var(--muted); font-size: 0.875rem; }
dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
dd small { display: block; color: var(--muted); font-size: 0.8125rem; }
figure { margin: 0; min-width: 0; }
figcaption { display: flex; flex-wrap: wrap; gap: 0 0.6rem; align-items: baseline; }
.grid {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  gap: 2rem 2.5rem; margin-top: 2rem;
}
.plot { padding: 0.75rem 0.75rem 1.5rem 3.4rem; }
.box { position: relative; height: 11rem; }
.wide .box { height: 20rem; }
.box svg { position: absolute; width: 100%; height: 100%; overflow: visible; }
.plot span { position: absolute; white-space: nowrap; line-height: 1; }
.plot .y { right: calc(100% + 0.5rem); transform: translateY(-50%); }
.plot .x { top: calc(100% + 0.5rem); transform: translateX(-50%); }
.plot .name { left: calc(100% + 0.6rem); transform: translateY(-50%); display: none; }
.plot .color-a { color: var(--a); } .plot .color-b { color: var(--b); }
.axis { text-align: center; padding-left: 3.4rem; }
path {
  fill: none; vector-effect: non-scaling-stroke; stroke-linecap: round; stroke-linejoin: round;
}
path.rule { stroke: var(--rule); stroke-width: 1; }
path.level { stroke: var(--muted); stroke-width: 1; stroke-dasharray: 5 5; }
path.level.odd { stroke-dasharray: 1 5; stroke-width: 2; }
path.mark { stroke: var(--warn); stroke-width: 2; }
path.mark.odd { stroke: var(--muted); stroke-width: 2; stroke-dasharray: 1 5; }
path.line { stroke-width: 2; } path.dots { stroke-width: 1.5; } path.dot { stroke-width: 7; }
path.faint { stroke-width: 1; opacity: 0.4; }
path.a { stroke: var(--a); } path.b { stroke: var(--b); }
rect.a { fill: var(--a); } rect.b { fill: var(--b); } rect.c { fill: var(--c); }
rect.d { fill: var(--d); }
rect.strip { fill: transparent; } rect.strip:hover { fill: var(--muted); fill-opacity: 0.15; }
.key {
  display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: 0.3rem 0 0; padding: 0;
}
.key li { font-size: 0.875rem; }
.key svg { width: 1.25rem; height: 0.625rem; margin-right: 0.35rem; }
.bar { display: block; width: 100%; min-width: 6rem; height: 1rem; margin-top: 0.25rem; }
.scroll { overflow-x: auto; } .scroll + .scroll { margin-top: 1.5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); font-size: 0.875rem; padding-bottom: 0.3rem; }
th, td { text-align: right; padding: 0.3rem 0.75rem; border-bottom: 1px solid var(--rule); }
th { font-weight: 600; } tbody th { font-weight: 400; white-space: nowrap; }
table:not(.left) td { white-space: nowrap; }
th:first-child, td:first-child, .left td, .left th { text-align: left; }
th:first-child { padding-left: 0; }
td.wide { width: 45%; } td, th { vertical-align: top; } .left td { overflow-wrap: anywhere; }
tr.own > * { font-weight: 600; background: var(--panel); }
details { margin-top: 0.75rem; } summary { cursor: pointer; color: var(--muted); }
@media (min-width: 48rem) {
  .wide .plot { padding-right: 12.5rem; } .wide .axis { padding-right: 12.5rem; }
  .plot .name { display: block; } .key .beside { display: none; }
}
@media (max-width: 30rem) {
  body { padding: 1rem 0.9rem 3rem; } .plot { padding-left: 2.9rem; padding-right: 0.9rem; }
  .wide .box { height: 15rem; } th, td { padding: 0.3rem 0.4rem; } td.wide { width: auto; }
  .bar { min-width: 2.5rem; } table { font-size: 0.875rem; } tbody th { white-space: normal; }
  table:not(.left) tbody th { min-width: 7rem; }
  dl { grid-template-columns: 1fr 1fr; }
}
"""
