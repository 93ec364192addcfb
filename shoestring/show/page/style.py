"""The page's style sheet: for report, live page and overview, light and dark, phone and desktop."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--paper:#fcfcfb;--ink:#1b1f24;--soft:#5d6670;--line:#e3e5e8;--well:#f2f3f4;--card:#fff;
--alert:#b3261e;--alert-well:#fbeeec;--amber:#8a5a00;--amber-well:#fbf3e1;--green-ink:#22694d;--green-well:#e8f3ee;
--blue-ink:#2a5aa3;--blue-well:#eaf0f9;
--blue:#3f74c4;--orange:#d0793a;--green:#3d9270;--purple:#8b6fc0;--yellow:#c9a227;--pink:#b8587f;--teal:#5796ad;--gray:#8d959e}
@media(prefers-color-scheme:dark){:root{--paper:#15181c;--ink:#e8eaed;--soft:#9ea7b1;--line:#2c3138;--well:#1d2126;--card:#1a1e23;
--alert:#ff8a80;--alert-well:#33201f;--amber:#e8b75a;--amber-well:#2f2819;--green-ink:#7fd0ad;--green-well:#1a2c25;
--blue-ink:#94b9f2;--blue-well:#1b2738;
--blue:#6f9fe6;--orange:#e59a62;--green:#62b894;--purple:#ab93dc;--yellow:#dcbb52;--pink:#d880a4;--teal:#7db7cc;--gray:#7d858e}}
.tone-forward,.tone-parameters{--tone:var(--blue)}
.tone-backward,.tone-gradients{--tone:var(--orange)}
.tone-update,.tone-activations{--tone:var(--green)}
.tone-optimizer{--tone:var(--purple)}
.tone-temporaries{--tone:var(--yellow)}
.tone-inputs{--tone:var(--pink)}
.tone-buffers{--tone:var(--teal)}
.tone-other{--tone:var(--gray)}
.tone-alert{--tone:var(--alert)}
.tone-run-0{--tone:var(--blue)}.tone-run-1{--tone:var(--orange)}.tone-run-2{--tone:var(--green)}.tone-run-3{--tone:var(--purple)}
.tone-run-4{--tone:var(--pink)}.tone-run-5{--tone:var(--yellow)}.tone-run-6{--tone:var(--teal)}.tone-run-7{--tone:var(--gray)}
.tone-run-8{--tone:var(--alert)}.tone-run-9{--tone:var(--ink)}
*{box-sizing:border-box}
[hidden]{display:none!important}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
overflow-wrap:anywhere;-webkit-text-size-adjust:100%}
main,nav{max-width:72rem;margin:auto;padding:2.25rem 1rem 3rem}
main{display:grid;grid-template-columns:minmax(0,1fr);gap:2.25rem 3rem}
nav{padding:1rem 1rem 0}
nav+main{padding-top:1.5rem}
nav{font-size:.875rem;color:var(--soft)}
nav a{color:inherit;text-underline-offset:.2em}
@media(min-width:54rem){main{grid-template-columns:repeat(12,minmax(0,1fr));padding:2.25rem 2.5rem}nav{padding:1.5rem 2.5rem 0}
nav+main{padding-top:2rem}main>*{grid-column:span 6}main>.lead{grid-column:span 7}main>.beside{grid-column:span 5}
main>.wide{grid-column:1/-1}
.lead,.beside{display:flex;flex-direction:column}.lead figure,.beside figure{margin-top:auto}}
h1,h2,p,ul,figure,dl,dd,pre{margin:0;padding:0}
h1{font-size:1rem;font-weight:400;line-height:1.5;display:flex;flex-wrap:wrap;gap:.4rem .625rem;align-items:center}
h1 b{font-weight:600}
h1 span{font-size:.875rem;color:var(--soft)}
h2{font-size:1.0625rem;font-weight:650;line-height:1.3;margin-bottom:.25rem}
h1 .pill,.pill{display:inline-flex;align-items:center;gap:.45em;font-size:.8125rem;font-weight:600;line-height:1;
padding:.4em .75em .4em .65em;border-radius:1em;background:var(--line);color:var(--soft);white-space:nowrap}
.pill::before{content:"";width:.5em;height:.5em;border-radius:50%;background:currentColor}
h1 .running,.running.pill,h1 .planning,.planning.pill{color:var(--blue-ink);background:var(--blue-well)}
h1 .finished,.finished.pill{color:var(--green-ink);background:var(--green-well)}
h1 .early,.early.pill{color:var(--green-ink);background:var(--green-well)}
h1 .data-ended,.data-ended.pill{color:var(--amber);background:var(--amber-well)}
h1 .failed,h1 .died,h1 .diverged,.failed.pill,.died.pill,.diverged.pill{color:var(--alert);background:var(--alert-well)}
h1 .warned,.warned.pill{color:var(--amber);background:var(--amber-well)}
@media(prefers-reduced-motion:no-preference){.running.pill::before,.planning.pill::before{animation:breathe 2.4s ease-in-out infinite}}
@keyframes breathe{50%{opacity:.25}}
.verdict,h1.verdict{font-size:clamp(1.25rem,1.1rem + .6vw,1.5rem);font-weight:650;line-height:1.2;letter-spacing:-.018em;
margin:.75rem 0 1.25rem;max-width:44em;text-wrap:balance;overflow-wrap:break-word;font-variant-numeric:tabular-nums}
.note{color:var(--soft);font-size:.875rem;max-width:40rem;margin-bottom:.75rem}
.banner{background:var(--well);border-left:3px solid var(--gray);border-radius:0 6px 6px 0;padding:.875rem 1.125rem;
margin-bottom:1.5rem;max-width:46rem;white-space:pre-line}
.banner.data-ended{background:var(--amber-well);border-color:var(--amber)}
.banner.failed,.banner.died,.banner.diverged{background:var(--alert-well);border-color:var(--alert)}
.banner .last{display:block;color:var(--soft);font-size:.875rem;margin-top:.25rem}
.progress{margin-bottom:1.5rem}
.progress svg{height:.5rem;border-radius:.25rem;background:var(--line)}
.progress p{font-size:.875rem;color:var(--soft);margin-top:.5rem;display:flex;gap:.75rem}
.progress b{flex:none;white-space:nowrap;color:var(--ink);font-variant-numeric:tabular-nums}
.pale{opacity:.5}
.tiles{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:.875rem .75rem}
@media(min-width:40rem){.tiles{display:flex;flex-wrap:wrap;gap:.875rem 1.5rem}.tiles>div{flex:1 1 7rem;min-width:max-content}}
.tiles dt{font-size:.8125rem;color:var(--soft)}
.tiles dd{font-size:clamp(1rem,.8rem + .6vw,1.25rem);font-weight:600;line-height:1.3;letter-spacing:-.01em;
font-variant-numeric:tabular-nums}
.tiles dd+dd{font-size:.8125rem;font-weight:400;letter-spacing:0;color:var(--soft)}
svg{display:block;width:100%;height:auto}
figure svg{max-width:38rem}
figure.chart svg{max-width:none}
.stage{position:relative;touch-action:pan-y;cursor:crosshair;border-radius:6px;user-select:none;-webkit-user-select:none}
:focus-visible{outline:2px solid var(--blue);outline-offset:2px}
.stage svg{display:block;overflow:visible}
.stage svg svg{overflow:hidden}
.tip{position:absolute;z-index:2;pointer-events:none;
background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.5rem .75rem;
font-size:.8125rem;line-height:1.5;box-shadow:0 4px 16px #0002;max-width:min(22rem,80%);font-variant-numeric:tabular-nums;color:var(--soft)}
.tip b{color:var(--ink);font-weight:600}
.tip i{height:.2rem;vertical-align:.25em;margin-right:.4rem}
.spoken{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
.tools{display:flex;flex-wrap:wrap;gap:.5rem .75rem;align-items:center;
font-size:.8125rem;color:var(--soft);margin-bottom:.5rem;min-height:1.9rem}
.tools button,.tools select{font:inherit;color:var(--ink);background:var(--card);border:1px solid var(--line);border-radius:6px;
padding:.2rem .625rem;cursor:pointer;max-width:100%}
.tools button[aria-pressed=true]{background:var(--blue-well);border-color:var(--blue);color:var(--blue-ink)}
.tools button:disabled{opacity:.5;cursor:default}
.tools label{display:inline-flex;align-items:center;gap:.5rem}
.tools input{width:7rem;accent-color:var(--blue)}
.legend button{font:inherit;color:inherit;background:none;border:0;padding:.1rem 0;cursor:pointer;text-align:left}
.legend button[aria-pressed=false]{opacity:.45;text-decoration:line-through}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft);font-variant-numeric:tabular-nums}
@media(max-width:30rem){svg text{font-size:13.5px}}
.stage svg text{font-size:12px}
svg rect,svg circle{fill:var(--tone)}
svg .grid{stroke:var(--line)}
svg .curve{fill:none;stroke:var(--tone);stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .curve.faint{opacity:.22;stroke-width:1.25}
svg .band{fill:var(--tone);opacity:.16}
svg .best{fill:none;stroke:var(--tone);stroke-width:2}
svg .border{stroke:var(--line);stroke-dasharray:2 3;stroke-width:1.5}
svg .epoch{font-size:10.5px;opacity:.85}
svg .cross line{stroke:var(--soft);stroke-width:1}
svg .cross circle{stroke:var(--card);stroke-width:1.5}
svg .chosen{fill:var(--blue);opacity:.15}
svg .limit{stroke:var(--alert);stroke-width:1.5;stroke-dasharray:5 4}
svg .limit-text{fill:var(--alert)}
figure.timeline{margin-bottom:1rem}
figure.timeline svg{max-width:none;min-width:42rem}
svg .heading{fill:var(--ink);font-weight:600}
svg .filled{fill:var(--tone)}
svg .box{stroke:var(--paper);stroke-width:.75}
svg .piece{pointer-events:none}
svg .piece text{fill:var(--paper);font-size:11px}
svg .dark text{fill:#15181c}
.idle{opacity:.3}
.later{opacity:.7}
.gauge{display:grid;gap:.875rem;margin-bottom:1.5rem}
.gauge div p{display:flex;justify-content:space-between;font-size:.9375rem;gap:1rem;margin-bottom:.25rem}
.gauge b,td,tbody th,.parts span{font-variant-numeric:tabular-nums}
.gauge svg,.stack svg{height:.75rem;border-radius:3px;background:var(--well)}
.stack svg{height:2.25rem;max-width:none}
.gap,.mark{vector-effect:non-scaling-stroke;stroke:var(--paper);stroke-width:7px}
.mark{stroke:var(--alert);stroke-width:2.5px}
.gauge .note{margin:0}
.gauge .note::before{content:"";display:inline-block;width:2px;height:.9em;background:var(--alert);margin-right:.5rem;
vertical-align:-.1em}
table{border-collapse:collapse;width:100%;font-size:.9375rem}
th,td{text-align:right;padding:.5rem 0 .5rem .5rem;border-bottom:1px solid var(--line);font-weight:400;white-space:nowrap}
th:first-child{text-align:left;padding-left:0}
thead th{color:var(--soft);font-size:.8125rem}
.compared tbody td:nth-child(3){font-weight:650}
.compared tr.budget td{font-weight:400;white-space:normal}
.over{color:var(--alert)}
@media(max-width:30rem){table{font-size:.8125rem}thead th{font-size:.75rem}.compared td:nth-child(4){white-space:normal}}
ul{list-style:none}
h2+pre,h2+ul{margin-top:.75rem}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;font-size:.875rem;color:var(--soft);margin-top:.5rem}
i{display:inline-block;width:.7rem;height:.7rem;border-radius:2px;margin-right:.5rem;background:var(--tone)}
.parts{margin-top:.75rem;font-size:.9375rem}
.parts li{display:grid;grid-template-columns:1fr auto 3.5rem;gap:.75rem;padding:.3rem 0;border-bottom:1px solid var(--line)}
.parts span{text-align:right;white-space:nowrap}
.parts span:last-child{color:var(--soft)}
.rows li{padding:.625rem 0;border-bottom:1px solid var(--line)}
.rows li p{color:var(--soft);font-size:.9375rem}
.rows li p b{color:var(--ink);font-weight:500;font-variant-numeric:tabular-nums}
.events li{display:grid;grid-template-columns:6.5rem minmax(0,1fr);gap:.75rem;padding:.5rem 0;border-bottom:1px solid var(--line);
font-size:.9375rem}
.events span{color:var(--soft);font-variant-numeric:tabular-nums;white-space:nowrap}
.events p{white-space:pre-line}
.events b{font-weight:600;margin-right:.25rem}
.events .warned b{color:var(--amber)}
.events .failed b{color:var(--alert)}
@media(max-width:30rem){.events li{grid-template-columns:5.75rem minmax(0,1fr);gap:.5rem;font-size:.875rem}}
code,pre,.hash{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.875rem}
code{font-weight:600}
pre{background:var(--well);border-radius:6px;padding:1rem;white-space:pre-wrap;max-height:28rem;overflow:auto;line-height:1.5}
footer{border-top:1px solid var(--line);padding-top:1.25rem;font-size:.875rem;color:var(--soft)}
footer dl{display:grid;grid-template-columns:minmax(5rem,auto) 1fr;gap:.35rem 1.25rem}
footer dd{color:var(--ink)}
.verdict+.note{margin:-.75rem 0 0}
.tag{font-size:.75rem;font-weight:600;
color:var(--green-ink);background:var(--green-well);border-radius:1em;padding:.1em .6em;margin-left:.25rem}
.scroll{overflow-x:auto}
main:has(.runs){max-width:100rem}
.runs{font-size:.875rem}
.runs th,.runs td{padding:.5rem .625rem;vertical-align:top}
.runs thead th{vertical-align:bottom;text-transform:none}
.runs thead button{font:inherit;color:inherit;background:none;border:0;padding:.15rem 0;cursor:pointer;white-space:nowrap}
.runs thead [aria-sort=ascending] button::before{content:"↑ "}
.runs thead [aria-sort=descending] button::before{content:"↓ "}
.runs thead [aria-sort=ascending],.runs thead [aria-sort=descending]{color:var(--ink);font-weight:600}
.runs .tick{width:1px;padding:.5rem .25rem .5rem 0;text-align:left}
.runs .tick label{display:flex;align-items:center;gap:.4rem;min-height:1.4rem}
.runs .tick i{margin:0;width:.6rem;height:.6rem;border-radius:50%}
.runs .tick i.off{background:none}
.runs:not(.live) input{display:none}
.runs input{margin:0;accent-color:var(--blue)}
.runs tbody th,.runs thead th:nth-child(2){text-align:left;padding-left:.25rem;white-space:normal;min-width:9rem;max-width:20rem}
.runs tbody th a{color:var(--ink);font-weight:600;text-underline-offset:.2em;text-decoration-color:var(--line)}
.runs tbody th a:hover{text-decoration-color:currentColor}
.runs tbody th span,.state>span:not(.pill){display:block;color:var(--soft);font-size:.8125rem}
.runs .state,.runs thead th:nth-child(3){text-align:left;white-space:normal;min-width:13rem}
.runs .state .why:is(.failed,.died,.diverged){color:var(--alert)}
.runs .state .why.data-ended{color:var(--amber)}
.runs .state svg{height:.25rem;border-radius:.125rem;background:var(--line);margin-top:.35rem;max-width:14rem}
.runs .warned{color:var(--amber);font-size:.8125rem;font-weight:600;white-space:nowrap}
.runs .long{text-align:left;white-space:normal;min-width:14rem}
.runs tbody tr:hover{background:var(--well)}
@media(max-width:40rem){.runs,.runs tbody{display:block}
.runs thead tr{display:flex;flex-wrap:wrap;gap:0 .875rem}
.runs tbody tr{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:.35rem .75rem;padding:.75rem 0;
border-bottom:1px solid var(--line)}
.runs :is(thead,tbody) :is(th,td){display:block;border:0;padding:0;text-align:left;white-space:normal;width:auto;min-width:0;max-width:none}
.runs tbody th{grid-column:2/-1}
.runs .state,.runs td.long{grid-column:1/-1}
.runs td[data-v=""]{display:none!important}
.runs td[data-label]::before{content:attr(data-label);display:block;color:var(--soft);font-size:.75rem}}
#connection{position:fixed;left:50%;bottom:1.25rem;transform:translateX(-50%);width:max-content;max-width:calc(100% - 2rem);
background:var(--ink);color:var(--paper);font-size:.875rem;padding:.6rem 1.1rem;border-radius:2rem}
"""
