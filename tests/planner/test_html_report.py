"""report.html: opens offline, shows what there is, says what is missing."""
import html.parser
import json
import re
import xml.etree.ElementTree as ET

import pytest

from planner.cli import main
from planner.ledger import Entry, Ledger
from planner.report import page, svg
from tests.planner.made_traces import cpu_rank, write
from tests.planner.test_cli import TINY


class Page(html.parser.HTMLParser):
    """Tags, ids and addresses of a page; refuses tags that do not close."""

    VOID = ("meta", "line", "rect", "circle", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.addresses = [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.addresses += [values[k] for k in ("src", "href") if k in values]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        assert self.open and self.open.pop() == tag, tag


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert main(["estimate", str(tmp_path / "tiny.yaml"), "--quiet", "-o", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


def build(folder, **options):
    path, _ = page.build(folder, ledger=Ledger(folder / "ledger.sqlite"), **options)
    text = path.read_text()
    return text, Page(text)


def test_a_plan_alone(folder):
    text, parsed = build(folder)
    assert {"time", "cascade", "memory", "load", "lengths", "timeline"} <= set(parsed.ids)
    assert not parsed.addresses and "http" not in re.sub(r"http://www.w3.org/\S+", "", text)  # nothing is loaded from anywhere
    assert "Speed against memory: not drawn, no candidates.parquet" in text and "unknown" in text
    assert (folder / "timeline.json.gz").is_file() and len(text) < 300_000


def test_a_run_with_traces_ledger_and_waterfall(folder, tmp_path):
    write(folder, cpu_rank(0, sleeps=50), cpu_rank(1, sleeps=50))
    Ledger(folder / "ledger.sqlite").append_all([Entry(
        time="t", scenario="s", plan_identity=str(i), cluster="c", device="d", model="m", workload="w", world_size=2, layout="l", local_batch=1,
        status="completed", predicted_step_s=0.1, predicted_low_s=0.08, predicted_high_s=0.12, measured_step_s=0.1 + i * 0.015) for i in range(3)])
    bars = [{"name": "base", "speedup": 1.0}, {"name": "<b>fast</b> links", "speedup": 1.5}, {"name": "slow", "speedup": 1.2}]
    (folder / "waterfall.json").write_text(json.dumps({"steps": bars, "summary": "together"}))
    text, parsed = build(folder)
    assert {"changes", "scatter", "timeline"} <= set(parsed.ids)
    assert "3 runs, 2 inside their 90 % interval" in text and "synchronisation" in text and "<b>fast" not in text


def test_pictures_are_svg_files_of_their_own(folder):
    build(folder, export=True)
    pictures = sorted((folder / page.FOLDER).glob("*.svg"))
    assert len(pictures) >= 6
    for picture in pictures:
        root = ET.fromstring(picture.read_text())
        width = float(root.attrib["viewBox"].split()[2])
        for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
            assert float(rect.attrib["x"]) >= -0.1 and float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width + 1, picture
            assert float(rect.attrib["height"]) >= 0


def test_every_colour_of_a_picture_is_defined_light_and_dark(folder):
    text, _ = build(folder)
    used = set(re.findall(r"var\(--(\w+)\)", text)) - {"page"}
    assert used <= set(svg.LIGHT) and set(svg.LIGHT) == set(svg.DARK)


def test_a_failed_run_and_damage_are_said_and_the_rest_is_shown(folder):
    from costmodel.plan import Plan

    identity = Plan.load(folder / "plan.json").identity()
    (folder / "result.json").write_text(json.dumps({"schema_version": 1, "plan_identity": identity, "environment": {}, "status": "failed",
                                                    "world_size": 2, "steps": 0, "warmup_steps": 0, "message": "rank 1: gone"}))
    (folder / "traces").mkdir()
    (folder / "traces" / "rank-0.json").write_text("{")
    (folder / "waterfall.json").write_text("{")
    (folder / "ledger.sqlite").write_text("this is no database, and long enough to be taken for one " * 20)
    text, parsed = build(folder)
    assert "the run was failed: rank 1: gone" in text and "rank-0.json" in text and "waterfall.json" in text and "not a usable ledger" in text
    assert "time" in parsed.ids


def test_the_verb(folder, capsys, tmp_path):
    assert main(["report", str(folder), "-o", str(tmp_path / "r"), "--pictures", "--quiet"]) == 0
    lines = capsys.readouterr().out.split()
    assert lines[0].endswith("r/report.html") and any(line.endswith("time.svg") for line in lines)
    assert main(["report", str(tmp_path / "nothing")]) == 2


def test_axes_have_few_round_ticks():
    assert svg.Axis(0, 97, 0, 1).ticks() == [0, 20, 40, 60, 80]
    assert all(1 <= len(svg.Axis(low, high, 0, 1, log=True).ticks()) <= 6 for low, high in ((0.01, 100), (0.2, 0.9), (1e-5, 1e3)))
