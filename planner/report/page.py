"""report.html: one page that needs nothing but itself. Cards with pictures, the metric tree, the choices, remarks; light and dark, 390 to 1280 px,
and print. A small script saves a picture as SVG or PNG and switches the colours; without scripts the page reads the same."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.diagnose import Diagnosis, Rung, diagnose
from planner.errors import UsageError
from planner.files import write_text
from planner.ledger import Ledger
from planner.report import pictures, svg, timeline
from planner.report.diagnosis import category, value_of
from planner.report.terminal import options, percent, plan_line, seconds

FILE, FOLDER = "report.html", "pictures"
_ENTRIES = 400


def build(directory: Path | str, *, out: Path | None = None, ledger: Ledger | None = None, calibration_file: Path | None = None,
          export: bool = False) -> tuple[Path, Diagnosis]:
    """Writes the page and timeline.json.gz beside it (default: into the plan's own folder), with `export` each picture as a file.

    What is missing or damaged is said in the page; the rest is shown. Raises UsageError when there is nothing to show.
    """
    found = diagnose(directory, calibration_file=calibration_file)
    target = out or found.directory
    notes = list(found.notes)
    try:
        entries = (ledger or Ledger()).entries(last=_ENTRIES)
    except UsageError as error:
        notes.append(str(error))
        entries = []
    material = pictures.Material(found=found, entries=entries, changes=_changes(found.directory, notes))
    figures, missing = pictures.draw(material)
    timeline.write(target / timeline.FILE, found.ranks, found.steps)
    if export:
        pictures.write_files(figures, target / FOLDER)
    path = target / FILE
    write_text(path, page(found, figures, missing, notes))
    return path, found


def _changes(directory: Path, notes: list[str]) -> dict[str, Any] | None:
    path = directory / "waterfall.json"
    if not path.is_file():
        return None
    try:
        body = json.loads(path.read_text())
        return body if {"steps", "summary"} <= set(body) else None
    except (OSError, json.JSONDecodeError) as error:
        notes.append(f"left out: {path}: {error}")
        return None


def page(found: Diagnosis, figures: Sequence[svg.Figure], missing: Sequence[tuple[str, str]], notes: Sequence[str]) -> str:
    """The whole document."""
    plan = found.plan
    title = plan.scenario if plan is not None else found.directory.name
    parts = [_head(title), '<header><div><h1>', html.escape(title), "</h1>", _subtitle(found), "</div>", _BUTTON, "</header><main>", _tiles(found)]
    parts += ['<div class="grid">', *(_card(f) for f in figures), "</div>"]
    if found.tree:
        heads = ("level", "metric, and its source or what is missing", "value", "evidence")
        parts.append(_table("Metric tree", heads, [_rung(r) for r in found.tree], right=(2,)))
    accounting = found.measured or found.predicted
    if accounting is not None:
        rows = [(name, percent(value / accounting.step)) for name, value in accounting.relief().items() if value > 0]
        parts.append(_table(f"What relief would bring at most ({accounting.source})", ("constraint", "share of the step"), rows, right=(1,)))
    if plan is not None:
        parts.append(_table("Precision and checkpoint policy", ("region", "blocks", "choice"), options(plan), right=(1,)))
    if found.activations:
        rows = [(region, f"{v['largest']:.4g}", f"{v['rms']:.4g}", f"{v['largest'] / v['rms']:.1f}" if v["rms"] else "-")
                for region, v in found.activations.items()]
        parts.append(_table("Activations", ("region", "largest", "root mean square", "ratio"), rows, right=(1, 2, 3)))
    remarks = [*notes, *(f"{name}: not drawn, {reason}" for name, reason in missing)]
    if remarks:
        parts.append('<section class="wide"><h2>Remarks</h2><ul>' + "".join(f"<li>{html.escape(r)}</li>" for r in remarks) + "</ul></section>")
    return "".join([*parts, "</main>", _SCRIPT, "</body></html>\n"])


def _head(title: str) -> str:
    light = "".join(f"--{k}:{v};" for k, v in svg.LIGHT.items())
    dark = "".join(f"--{k}:{v};" for k, v in svg.DARK.items())
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{html.escape(title)}</title><style>:root{{{light}--page:#f3f5f7;color-scheme:light}}"
            f"@media(prefers-color-scheme:dark){{:root:not(.light){{{dark}--page:#12161b;color-scheme:dark}}}}"
            f":root.dark{{{dark}--page:#12161b;color-scheme:dark}}{_CSS}{svg.STYLE}</style></head><body>")


_CSS = """
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.45 system-ui,-apple-system,"Segoe UI",sans-serif}
header{display:flex;justify-content:space-between;align-items:flex-start;gap:12px;max-width:1240px;margin:0 auto;padding:22px 16px 6px}
h1{font-size:22px;margin:0}h2{font-size:15px;margin:0 0 8px}.sub{color:var(--soft);margin:3px 0 0;font-size:13.5px}
main{max-width:1240px;margin:0 auto;padding:8px 16px 32px}
button{font:inherit;font-size:12.5px;color:var(--soft);background:none;border:1px solid var(--line);border-radius:5px;padding:2px 8px;
cursor:pointer;white-space:nowrap}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-bottom:14px}
.tile,.card,.wide{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px;min-width:0}
.tile b{display:block;font-size:19px;font-weight:600;overflow-wrap:anywhere}.tile span{color:var(--soft);font-size:12.5px}
.grid{columns:2 500px;column-gap:14px}.grid .card{break-inside:avoid;margin:0 0 14px}
.card header{padding:0;margin:0 0 6px}.card h2{margin:0}svg.figure{width:100%;height:auto;display:block}
.card p{color:var(--soft);margin:6px 0 0;font-size:13px}
.wide{margin-bottom:14px;overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13.5px}
th{color:var(--soft);font-weight:500;text-align:left}
th,td{padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}.r{text-align:right}
td.r{white-space:nowrap}td small{display:block;overflow-wrap:anywhere;color:var(--soft);font-size:12px}td.unknown{color:var(--soft);font-style:italic}
ul{margin:0;padding-left:18px;font-size:13.5px}li{overflow-wrap:anywhere}
@media(max-width:520px){main,header{padding-left:10px;padding-right:10px}.tile,.card,.wide{padding:10px}td,th{padding-right:7px;font-size:12.5px}
.save{display:none}}
@media print{button{display:none}.card,.wide,.tile{break-inside:avoid}}
"""
_BUTTON = '<button onclick="swap()" aria-label="switch between light and dark">light / dark</button>'
_SCRIPT = """<script>
function swap(){const r=document.documentElement,
d=r.classList.contains('dark')||(!r.classList.contains('light')&&matchMedia('(prefers-color-scheme:dark)').matches);
r.classList.toggle('dark',!d);r.classList.toggle('light',d)}
function save(id,kind){const s=document.getElementById(id),c=s.cloneNode(true),st=getComputedStyle(document.documentElement),b=s.viewBox.baseVal;
c.setAttribute('xmlns','http://www.w3.org/2000/svg');c.setAttribute('width',b.width*2);c.setAttribute('height',b.height*2);
let t=new XMLSerializer().serializeToString(c).replace(/var\\(--(\\w+)\\)/g,(m,n)=>st.getPropertyValue('--'+n).trim());
const css=SHEET.replace(/var\\(--(\\w+)\\)/g,(m,n)=>st.getPropertyValue('--'+n).trim());
t=t.replace(/(<svg[^>]*>)/,'$1<style>svg{background:'+st.getPropertyValue('--card').trim()+';font-family:sans-serif}'+css+'</style>');
const u=URL.createObjectURL(new Blob([t],{type:'image/svg+xml'})),a=document.createElement('a');
if(kind=='svg'){a.href=u;a.download=id+'.svg';a.click();return}
const i=new Image();i.onload=()=>{const k=document.createElement('canvas');k.width=b.width*4;k.height=b.height*4;
k.getContext('2d').drawImage(i,0,0,k.width,k.height);
a.href=k.toDataURL('image/png');a.download=id+'.png';a.click()};i.src=u}
const SHEET=""" + json.dumps(svg.STYLE) + ";</script>"


def _subtitle(found: Diagnosis) -> str:
    if found.plan is None:
        return '<p class="sub">a trace without a plan</p>'
    plan = found.plan
    lines = [f"{plan.model.name} on {plan.cluster.num_ranks} x {plan.cluster.device.name} ({plan.cluster.name}), workload {plan.workload.name}",
             plan_line(plan)]
    if plan.predict_only:
        lines.append("predict-only: " + "; ".join(plan.predict_only))
    if found.result is not None and found.result.status != "completed":
        lines.append(f"the run was {found.result.status}: {found.result.message or 'no message'}")
    return "".join(f'<p class="sub">{html.escape(words)}</p>' for words in lines)


def _tiles(found: Diagnosis) -> str:
    tiles = [("bound by", category(found.binding) if found.binding.startswith("communication") else found.binding.replace("_", " "),
              "measured" if found.measured else "simulated")]
    made = found.estimate
    if made is not None:
        step = made.step_time
        tiles.append(("predicted step", seconds(step.value), f"{seconds(step.low)} .. {seconds(step.high)}, {step.source}"))
    run = found.result.measured if found.result is not None else None
    if run is not None:
        error = f"{run.step_time_s.median / made.step_time.value - 1:+.1%} off the prediction" if made is not None else "median"
        tiles.append(("measured step", seconds(run.step_time_s.median), error))
    if made is not None:
        rate = run.examples_per_second if run else made.examples_per_second
        tiles.append(("examples per second", f"{rate:,.0f}", "measured" if run else "simulated"))
        if made.local_mfu is not None:
            tiles.append(("local MFU", percent(made.local_mfu), f"simulated, of {made.mfu_peak / 1e12:,.4g} TFLOP/s"))
        if made.dollars_per_billion_examples:
            tiles.append(("$ per billion examples", f"${made.dollars_per_billion_examples:,.0f}", "simulated"))
    unattributed = found.measured or found.predicted
    if unattributed is not None:
        tiles.append(("unattributed", percent(unattributed.unattributed), unattributed.source))
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><span>{html.escape(n)}</span><b>{html.escape(v)}</b><span>{html.escape(s)}</span></div>' for n, v, s in tiles) + "</div>"


def _card(figure: svg.Figure) -> str:
    buttons = "".join(f"""<button class="save" onclick="save('{figure.name}','{kind}')">{kind.upper()}</button> """ for kind in ("svg", "png"))
    caption = f"<p>{html.escape(figure.caption)}</p>" if figure.caption else ""
    return f'<section class="card"><header><h2>{html.escape(figure.title)}</h2><span>{buttons}</span></header>{figure.inline()}{caption}</section>'


def _rung(rung: Rung) -> tuple[str, ...]:
    return (rung.level, f"{rung.name}\n{rung.source or rung.missing}", value_of(rung), rung.evidence)


def _cell(words: str) -> str:
    """The first line, and the others small below it."""
    first, _, rest = words.partition("\n")
    return html.escape(first) + (f"<small>{html.escape(rest)}</small>" if rest else "")


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    head = "".join(f'<th{" class=r" if i in right else ""}>{html.escape(h)}</th>' for i, h in enumerate(heads))
    body = "".join("<tr>" + "".join(f'<td class="{"r " if i in right else ""}{"unknown" if cell == "unknown" else ""}">{_cell(cell)}</td>'
                                     for i, cell in enumerate(row)) + "</tr>" for row in rows)
    return f'<section class="wide"><h2>{html.escape(title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></section>'
