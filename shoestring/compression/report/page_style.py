"""The CSS that only pages of compressed models need: the frontier, and a table of layers that is stacked on a phone."""

from __future__ import annotations

STYLE_OF_COMPRESSION = """.frontier svg .word{font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:4px}
.frontier svg .predicted{fill:var(--blue-ink)}
.frontier svg .measured{fill:var(--orange)}
.frontier svg text.measured{fill:var(--ink)}
.frontier svg text.alert{fill:var(--alert)}
.frontier svg .ring{fill:none;stroke:var(--blue-ink);stroke-width:2}
.frontier .legend{display:grid;gap:.25rem;font-variant-numeric:tabular-nums}
.frontier .legend li{display:flex;gap:.5rem;align-items:flex-start}
.frontier .legend svg{width:1.1rem;height:1.1rem;flex:none;margin-top:.15rem}
@media(min-width:54rem){.frontier>svg text{font-size:10.5px}}
table+.scroll{margin-top:1.5rem}
.metrics th,.against tbody th{white-space:normal}
.metrics thead th,.against tbody th{overflow-wrap:normal}
.metrics tbody th{min-width:5rem}
@media(min-width:40rem){.against,.metrics{table-layout:fixed}.against th:first-child,.metrics th:first-child{width:28%}}
@media(max-width:30rem){:is(.against,.metrics) tr{display:grid;grid-template-columns:repeat(4,minmax(0,1fr))}
:is(.against,.metrics) tr>:first-child{grid-column:1/-1;border:0;padding-bottom:0}
:is(.against,.metrics) :is(td,th:not(:first-child)){padding-left:.25rem;white-space:normal;overflow-wrap:anywhere}}
.metrics b{font-weight:650}
.layers th:first-child{white-space:normal}
.layers tbody th{font-size:.875rem}
.layers .how{max-width:14rem;white-space:normal}
.layers .bar{width:9%;padding-left:.625rem}
.layers svg{height:.5rem;border-radius:2px;background:var(--well)}
.rows .warned b{color:var(--amber)}
@media(max-width:44rem){.layers,.layers tbody{display:block}.layers thead{display:none}
.layers tr{display:grid;grid-template-columns:4.5rem minmax(0,1fr) 4.5rem minmax(0,1fr);gap:.1rem .5rem;align-items:center;
padding:.625rem 0;border-bottom:1px solid var(--line)}
.layers th,.layers td,.layers .bar{display:block;border:0;padding:0;text-align:left;width:auto;white-space:normal}
.layers tbody th{grid-column:1/-1;font-weight:600;font-size:.8125rem}
.layers .shape,.layers .how{grid-column:span 2;color:var(--soft);max-width:none}
.layers .how::after{content:", " attr(data-bits) " bits"}
.layers .bits{display:none}}
"""
