"""Style of the page: light and dark by the reader's setting, one column on a phone, plain on paper."""

STYLE = """
:root {
  --back: #ffffff; --card: #f6f7f9; --text: #1c2330; --soft: #5b6575; --rule: #d9dee6; --cell: #2563a8;
  --good: #1a7f4b; --fair: #8a6100; --bad: #b3261e;
  --s0: #2563a8; --s1: #d1610d; --s2: #1a8a5a; --s3: #a5338f; --s4: #8a6d00; --s5: #00838f; --s6: #6b4fc4;
  --s7: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #12161c; --card: #1b212a; --text: #e6eaf0; --soft: #9da8b8; --rule: #333c49; --cell: #6aa9ee;
    --good: #5bd197; --fair: #e3b341; --bad: #ff8a80;
    --s0: #6aa9ee; --s1: #f59a55; --s2: #5bd197; --s3: #e08ad0; --s4: #e3c25a; --s5: #4dd0dc; --s6: #b39ff5;
    --s7: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1360px; padding: 24px 16px 48px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 26px; line-height: 1.2; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 15px; margin: 0 0 6px; }
p { margin: 6px 0; max-width: 78ch; }
.soft, .legend, figcaption, footer { color: var(--soft); font-size: 13px; }
.warn { border-left: 4px solid var(--bad); padding: 6px 12px; background: var(--card); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(190px, 100%), 1fr)); gap: 12px; }
.tile, figure { background: var(--card); border-radius: 8px; padding: 12px 14px; margin: 0; }
.tile b { display: block; font-size: 24px; line-height: 1.25; font-weight: 600; }
.charts {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 14px;
}
figure { break-inside: avoid; min-width: 0; }
svg { display: block; width: 100%; height: auto; max-width: 640px; }
svg text { fill: var(--soft); font-size: 13px; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke: var(--c); stroke-width: 2.2; stroke-linejoin: round; }
.second { stroke-dasharray: 2 4; }
.target { stroke-dasharray: 8 5; stroke-width: 1.6; }
.dot, .bar { fill: var(--c); }
.cell { fill: var(--cell); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); } .s7 { --c: var(--s7); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 8px 0 0; padding: 0; list-style: none; }
.legend i {
  display: inline-block; width: 14px; height: 10px; margin-right: 6px; border-radius: 2px;
  background: var(--c);
}
.legend i.target { background: none; height: 0; border-top: 2px dashed var(--c); vertical-align: middle; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td {
  text-align: left; vertical-align: top; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--rule);
}
thead th { color: var(--soft); font-size: 13px; font-weight: 600; }
tbody th { font-weight: 500; min-width: 130px; }
td { overflow-wrap: anywhere; min-width: 96px; }
.verdict { font-weight: 600; white-space: nowrap; }
.good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); }
.asked {
  border: 1px solid currentColor; border-radius: 4px; padding: 0 5px; font-size: 12px; white-space: nowrap;
}
small { display: block; color: var(--soft); font-size: 13px; }
pre { overflow-x: auto; background: var(--card); padding: 12px; border-radius: 8px; font-size: 12.5px; }
summary { cursor: pointer; }
footer { margin-top: 40px; border-top: 1px solid var(--rule); padding-top: 10px; }
.labels { grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
@media (max-width: 640px) {
  thead { display: none; }
  td, tbody th { display: block; border: 0; padding: 2px 0; }
  tbody th { font-weight: 650; }
  td:empty { display: none; }
  td[data-head]::before {
    content: attr(data-head); display: block; color: var(--soft); font-size: 13px; margin-top: 4px;
  }
  tr { display: block; border-bottom: 1px solid var(--rule); padding: 8px 0; }
}
@media print {
  @page { margin: 14mm; }
  * { print-color-adjust: exact; }
  :root { --back: #fff; --card: #fff; --text: #000; --soft: #444; --rule: #bbb; }
  body { max-width: none; padding: 0; font-size: 11pt; }
  .charts { grid-template-columns: repeat(2, 1fr); } figure, .tile { border: 1px solid var(--rule); }
  tr { break-inside: avoid; } h2 { break-after: avoid; }
}
"""
