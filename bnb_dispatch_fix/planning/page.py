"""The frame and the style of the page that `plan --html` writes."""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<svg class="hidden" aria-hidden="true"><defs>
<pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse">
<path class="hatch" d="M0 8 8 0M-2 2 2 -2M6 10 10 6"/></pattern></defs></svg>
<main>
{body}
</main>
</body>
</html>
"""

STYLE = """
:root{--page:#f4f5f7;--card:#fff;--ink:#1b1f27;--dim:#5d6675;--line:#dfe3ea;--track:#e9ecf1;
--block:#2f7fd6;--wide:#8a5bd1;--leaf:#d99a1c;--away:#d4453c;--good:#17803d;--bad:#c22f27;
--good-soft:#e3f4e8;--bad-soft:#fce8e6}
@media(prefers-color-scheme:dark){:root{--page:#12151b;--card:#1b2029;--ink:#e8ebf0;
--dim:#9aa4b4;--line:#2e3541;--track:#2a303b;--block:#4c97ea;--wide:#a57fe3;--leaf:#e0ab45;
--away:#e8645b;--good:#55c57a;--bad:#f0776f;--good-soft:#173323;--bad-soft:#3d1f1d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:20px 16px 40px;display:grid;gap:16px}
main>*{min-width:0}
.hidden{position:absolute;width:0;height:0}
header,.panel{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:16px 18px}
header{border-left:6px solid var(--bad)}
header.good{border-left-color:var(--good)}
h1{margin:0;font-size:15px;font-weight:600;color:var(--dim);overflow-wrap:anywhere}
.verdict{margin:2px 0 14px;font-size:clamp(20px,3.2vw,28px);line-height:1.2;font-weight:700;
color:var(--bad)}
.good .verdict{color:var(--good)}
.first{margin:-6px 0 14px;overflow-wrap:anywhere}
dl{display:flex;flex-wrap:wrap;gap:12px 36px;margin:0}
dt{color:var(--dim);font-size:13px}
dd{margin:0}
dd b{font-size:20px;font-variant-numeric:tabular-nums}
small{color:var(--dim);font-size:13px}
dd small{display:block}
.panels{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(320px,100%),1fr));
align-items:start}
h2{margin:0 0 12px;font-size:15px;font-weight:600;display:grid;gap:6px;justify-items:start}
.badge{font-size:13px;font-weight:600;padding:2px 10px;border-radius:99px;
background:var(--bad-soft);color:var(--bad)}
.good .badge{background:var(--good-soft);color:var(--good)}
.device{margin:0 0 10px}
.row{display:flex;justify-content:space-between;font-size:13px;
font-variant-numeric:tabular-nums}
.row b{font-weight:600}
.device.away .row,.device.away .modules{color:var(--away)}
.device.empty .row,.device.empty .modules{color:var(--dim)}
.device.empty .row b{font-weight:400}
.device svg{display:block;width:100%;height:22px;border-radius:5px;margin:2px 0}
.device.empty{margin-bottom:6px}
.device.empty svg{height:10px}
.modules{margin:0;font-size:12px;color:var(--dim);overflow-wrap:anywhere}
.device.empty .modules{display:none}
.given{fill:var(--track)}
.kept{fill:url(#hatch)}
.legend .kept{stroke:var(--line)}
.hatch{stroke:var(--dim);stroke-width:1;opacity:.55;fill:none}
.block{fill:var(--block)}.wide{fill:var(--wide)}.leaf{fill:var(--leaf)}.away{fill:var(--away)}
.scales{fill:#7a8aa0}.cache{fill:#1f9e8f}.working{fill:#8fd0c6}.reserve{fill:#b9bfc9}
line{stroke:var(--card);stroke-width:1;vector-effect:non-scaling-stroke}
.error{margin:12px 0 0;padding:10px 12px;border-radius:8px;background:var(--bad-soft);
font-size:13px;overflow-wrap:anywhere}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:6px 20px;margin:0;padding:0 4px;
font-size:13px;color:var(--dim)}
.legend li{display:flex;align-items:center;gap:7px}
.legend svg{width:14px;height:14px;border-radius:3px;flex:none}
table{width:100%;border-collapse:collapse;font-size:13px}
th{text-align:left;color:var(--dim);font-weight:400}
td,th{padding:5px 12px 5px 0;border-top:1px solid var(--line);vertical-align:middle}
thead th{border:0}
td:nth-child(2),th:nth-child(2){text-align:right;font-variant-numeric:tabular-nums}
td:nth-child(3){width:34%}
td svg{display:block;width:100%;height:10px;border-radius:3px}
.no{color:var(--leaf);font-weight:600}
.compared td:nth-child(3){width:auto}
code,pre{font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
code{overflow-wrap:anywhere}
pre{margin:10px 0 0;overflow-x:auto;padding:12px;border-radius:8px;background:var(--track)}
ol{margin:0;padding-left:22px}
summary{cursor:pointer;font-weight:600}
footer{color:var(--dim);font-size:12px;padding:0 4px}
@media(max-width:560px){main{padding:10px 10px 32px;gap:10px}.wide-only{display:none}
header,.panel{padding:14px}dl{gap:10px 24px}}
"""
