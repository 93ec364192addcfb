"""The CSS that only pages of federated runs need."""

from __future__ import annotations

STYLE_OF_FEDERATED = """@media(min-width:40rem){.tiles.many{display:grid;grid-template-columns:repeat(5,minmax(0,1fr))}}
.tiles svg{height:.375rem;border-radius:.1875rem;background:var(--line);margin-top:.3rem;max-width:8rem}
@media(max-width:30rem){.compared tbody th{white-space:normal;overflow-wrap:normal}}
.names th:first-child,.reasons td:nth-child(2){white-space:normal}
.names tbody th{font-size:.875rem}
.names th,.names td{vertical-align:top}
.reasons tbody th{min-width:7rem;width:35%}
.reasons td:nth-child(2),.reasons th:nth-child(2){text-align:left}
.ab tbody th span,.delta span{display:block;color:var(--soft);font-size:.8125rem}
.ab tbody th,.ab .verdict-of{white-space:normal}
.ab tbody th{min-width:9rem}
.ab .verdict-of{min-width:6rem}
.ab th:nth-child(5){text-align:center}
.delta b{font-weight:650}
.interval{width:32%}
.interval svg{height:1.25rem;min-width:7rem;background:var(--well);border-radius:3px}
.zero,.at{vector-effect:non-scaling-stroke;stroke:var(--soft);stroke-width:1px;stroke-dasharray:2 2}
.at{stroke:var(--tone);stroke-width:3px;stroke-dasharray:none}
.verdict-of{font-weight:600}
.verdict-of.tone-alert,.verdict-of.tone-update{color:var(--tone)}
.verdict-of.tone-other{font-weight:400;color:var(--soft)}
@media(max-width:40rem){.ab,.ab tbody{display:block}.ab thead{display:none}
.ab tr{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:.35rem .75rem;padding:.75rem 0;border-bottom:1px solid var(--line)}
.ab th,.ab td{display:block;border:0;padding:0;text-align:left}
.ab tbody th{grid-column:1/3;font-size:.9375rem;font-weight:600}
.ab tbody th span{font-weight:400}
.ab td[data-name]::before{content:attr(data-name);display:block;color:var(--soft);font-size:.75rem}
.ab td{font-size:.875rem}
.ab .verdict-of{grid-column:3;grid-row:1;text-align:right}
.ab .devices{grid-column:3;grid-row:2}
.ab td.interval{grid-column:2/-1;grid-row:3;width:auto;align-self:center}}
"""
