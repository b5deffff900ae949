"""Tables of published measurements: what is refused, what is listed, what is scored."""
from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks.published.__main__ import best_constant, main, score
from benchmarks.published.predict import CARRIED_OVER, POWER_EXPONENT, NotExpressible, calibrations, device_of, elsewhere, nearest, plan_of, predict
from benchmarks.published.table import TableError, read
from costmodel.calibration import fit
from costmodel.lower import lower
from costmodel.samples import Environment, Sample

STEP = {"id": "a", "kind": "step", "device": "H100-SXM", "source": "https://example.org/a", "model": "llama3-8b", "gpus": "8", "local_batch": "1",
        "sequence_length": "4096", "tokens_per_s_per_gpu": "5000"}
KERNEL = {"id": "k", "kind": "kernel", "device": "H200-SXM", "source": "https://example.org/k", "op": "linear", "phase": "forward", "dtype": "bf16",
          "features": "m=4096 k=4096 n=4096", "kernel_ms": "0.2"}
ATTENTION = {"op": "attention", "features": "tokens=4096 pairs=1000000 longest=1024 heads=8 head_dim=64"}
BUNDLED = Path(__file__).resolve().parents[2] / "benchmarks" / "published"


def table(folder: Path, *rows: dict, name: str = "t.csv") -> Path:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [",".join(columns), *(",".join(f'"{row.get(c, "")}"' for c in columns) for row in rows)]
    (folder / name).write_text("\n".join(lines) + "\n")
    return folder / name


@pytest.mark.parametrize(("base", "change", "message"), [
    (STEP, {"gpus": "eight"}, r"t.csv:2: gpus: 'eight'"),
    (STEP, {"gpus": ""}, "gpus: missing; a step row needs it"),
    (STEP, {"kind": "steps"}, "kind: 'steps': one of step, kernel is needed.*did you mean 'step'"),
    (STEP, {"source": ""}, "source: missing"),
    (STEP, {"tokens_per_s_per_gpu": ""}, "exactly one of step_ms, .* got none"),
    (STEP, {"step_ms": "4"}, "exactly one of .* got step_ms, tokens_per_s_per_gpu"),
    (STEP, {"tokens_per_s_per_gpu": "nan"}, "tokens_per_s_per_gpu: 'nan': a finite number > 0"),
    (STEP, {"tokens_per_s_per_gpu": "-1"}, "a finite number > 0"),
    (STEP, {"sequence_length": ""}, "sequence_length: missing; tokens_per_s_per_gpu needs it"),
    (STEP, {"hosts": "3"}, "8 GPUs do not divide over 3 hosts"),
    (STEP, {"layout": "fsdp=8 fsdp=4"}, "layout: .* a name is given twice"),
    (STEP, {"layout": "fsdp 8"}, "`name=value` separated by spaces"),
    (STEP, {"op": "linear"}, "op: no meaning in a step row"),
    (STEP, {"tps": "5"}, "column 'tps' is not part of the schema"),
    (KERNEL, {"kernel_ms": ""}, "kernel_ms: missing; a kernel row needs it"),
    (KERNEL, {"gpus": "8"}, "gpus: no meaning in a kernel row"),
    (KERNEL, {"phase": "fwd"}, "phase: 'fwd': one of forward, backward, step"),
])
def test_bad_rows_are_refused_with_line_and_column(tmp_path, capsys, base, change, message):
    path = table(tmp_path, {**base, **change})
    with pytest.raises(TableError, match=message):
        read(path)
    assert main([str(path), "--datasheet", "--out", str(tmp_path)]) == 2
    assert "t.csv" in capsys.readouterr().err and not (tmp_path / "published.json").exists()


def test_every_fault_of_a_file_is_told_at_once(tmp_path):
    with pytest.raises(TableError) as error:
        read(table(tmp_path, {**STEP, "gpus": "0"}, {**STEP, "local_batch": "x"}, STEP, STEP))
    assert [f.split(":")[1] for f in error.value.faults] == ["2", "3", "5"]
    (tmp_path / "empty.csv").write_text("id,kind,device,source\n")
    with pytest.raises(TableError, match="no rows"):
        read(tmp_path / "empty.csv")
    (tmp_path / "latin.csv").write_bytes(b"id,kind,device,source\n" + b"a,step,H100-SXM,x\n" * 1000 + b"b,step,H100\xe9,x\n")
    with pytest.raises(TableError, match=r"latin\.csv:1002: not UTF-8"):
        read(tmp_path / "latin.csv")
    (tmp_path / "ragged.csv").write_text("id,kind,device,source\na,step\n")
    with pytest.raises(TableError, match="more or fewer cells"):
        read(tmp_path / "ragged.csv")


@pytest.mark.parametrize(("base", "change", "reason"), [
    (STEP, {"device": "H100-SXN"}, "did you mean 'H100-SXM'"),
    (STEP, {"model": "gpt-5"}, "model 'gpt-5' is not bundled"),
    (STEP, {"layout": "fsdp=4 tp=2"}, "layout tp=2"),
    (STEP, {"layout": "fsdp=4"}, None),
    (STEP, {"layout": "fsdp=4 ddp=4 sparse_group=16"}, "is for 16 ranks, the row has 8 GPUs"),
    (STEP, {"layout": "fsdp=8 ddp=8"}, "layout: dense ddp 8 x fsdp 8"),
    (STEP, {"precision": "fp4"}, "precision 'fp4'"),
    (STEP, {"checkpoint": "full:0.7"}, "shares must be > 0 and sum to 1"),
    (STEP, {"execution": "xla"}, "execution 'xla'"),
    (STEP, {"attention": "torhc"}, "attention 'torhc'.*did you mean 'torch'"),
    (STEP, {"fusion": "all"}, "fusion 'all'.*none, norms, compiler, epilogues"),
    (STEP, {"loss": "compile"}, "loss 'compile'.*did you mean 'compiled'"),
    (STEP, {"optimizer": "lion"}, "optimizer 'lion'"),
    (STEP, {"overlap": "everything"}, "overlap 'everything'"),
    (STEP, {"table_update": "twice"}, "table_update 'twice'"),
    (STEP, {"reduce": "fp8"}, "reduce 'fp8'"),
    (STEP, {"hosts": "2"}, "2 hosts, nic_gb_s is not given"),
    (KERNEL, {"op": "conv"}, "op 'conv' is not one of the cost model"),
    (KERNEL, {"op": "all_reduce", "features": "num_bytes=1000000"}, "all_reduce is a collective: .*benchmarks.collectives"),
    (KERNEL, ATTENTION, "attention needs a variant; known: block, .*softmax"),
    (KERNEL, {**ATTENTION, "variant": "sofmax"}, "attention needs a variant.*did you mean 'softmax'"),
    (KERNEL, {"features": "m=4096 k=0 n=4096"}, "op linear: k must be > 0"),
    (STEP, {"precision": "*=bf16 txt.0=fp8_tensor"}, "precision 'txt.0' is the name of no region.*did you mean 'text.0'"),
    (STEP, {"checkpoint": "layers=full"}, "checkpoint 'layers' is the name of no region"),
    (KERNEL, {"features": "m=4096 k=4096"}, r"features \['k', 'm', 'n'\] are needed"),
])
def test_what_a_plan_cannot_say_is_listed(tmp_path, base, change, reason):
    (row,) = read(table(tmp_path, {**base, **change}))
    if reason is None:
        assert plan_of(row, device_of(row)).layout.ddp == 2
        return
    with pytest.raises(NotExpressible, match=reason):
        predict(row, [])
    points, left = score([row], [])
    assert not points and left[0][0] is row


def test_rows_of_one_configuration_are_one_point(tmp_path):
    rows = read(table(tmp_path, *({**KERNEL, "id": str(i), "kernel_ms": str(ms)} for i, ms in enumerate((0.1, 0.2, 0.9)))))
    (point,), left = score(rows, [])
    assert not left and point.measured == pytest.approx(0.2e-3) and len(point.rows) == 3


def test_the_best_constant_is_the_best(tmp_path):
    """Three of four kernels run at 100 TFLOP/s: no constant has a lower median error than that one's 0."""
    rows = read(table(tmp_path, *({**KERNEL, "id": str(m), "features": f"m={m} k=4096 n=4096", "kernel_ms": str(2 * m * 4096**2 / rate / 1e9)}
                                  for m, rate in ((1024, 100), (2048, 100), (4096, 100), (8192, 17)))))
    points, _ = score(rows, [])
    rate, error = best_constant(points, "flops")
    assert rate == pytest.approx(100e12, rel=1e-6) and error < 1e-6


def test_less_power_and_another_part(tmp_path):
    (row,) = read(table(tmp_path, {**STEP, "power_w": "350", "memory_bandwidth_tb_s": "2.4", "memory_gb": "96"}))
    device = device_of(row)
    assert device.peak_flops["bf16"] == pytest.approx(989.4e12 * 0.5 ** POWER_EXPONENT) and device.memory_bandwidth == 2.4e12
    slow, fast = predict(row, []), predict(dataclasses.replace(row, power=None, memory_bandwidth=None), [])
    assert slow.seconds > fast.seconds
    given = device_of(dataclasses.replace(row, peak_flops=500e12))
    assert given.peak_flops["bf16"] == pytest.approx(500e12) and given.peak_flops["fp8"] == pytest.approx(1000e12, rel=1e-3)


def test_utilisation_carries_over_from_the_nearest_calibration(tmp_path):
    """A linear measured at half of H200's peak is predicted at half of an H100 part's."""
    rows = read(table(tmp_path, {**KERNEL, "device": "H200-SXM"}, {**KERNEL, "id": "slow", "device": "H100-SXM", "peak_bf16_tflop_s": "494.7"}))
    h200 = device_of(rows[0])
    samples = [Sample(op="linear", phase="forward", features={"m": m, "k": 4096, "n": 4096}, dtype="bf16", host_seconds=1e-5,
                      seconds=2 * m * 4096**2 / (h200.peak_flops["bf16"] / 2)) for m in (1024, 2048, 4096, 8192, 16384)]
    calibration = fit(Environment(device_name="H200-SXM", device_kind="cuda"), samples, device=h200)
    assert nearest(device_of(rows[1]), [calibration]) is calibration and nearest(h200, []) is None
    same, slow = (predict(row, [calibration]) for row in rows)
    assert same.seconds == pytest.approx(2 * 4096**3 / (989.4e12 / 2), rel=0.05) and same.source in ("measured", "interpolated")
    assert slow.seconds == pytest.approx(2 * same.seconds, rel=0.05) and slow.source == "extrapolated"


def test_committed_calibrations_of_gpus_are_found():
    """They record their device as torch names it: `cuda`."""
    found = calibrations()
    assert found and all(c.environment.device_kind == "cuda" and c.device.kind == "gpu" for c in found)
    row = read(BUNDLED / "gemm.csv")[0]
    assert predict(row, found).source != "roofline" == predict(row, []).source


def test_of_another_system_neither_loader_nor_launches_of_a_replayed_step_are_ours(tmp_path):
    row = next(r for r in read(BUNDLED / "mlperf_dlrm_dcnv2.csv") if r.execution == "cuda_graph")
    device = device_of(row)
    samples = [Sample(op="linear", phase="forward", features={"m": m, "k": 512, "n": 512}, dtype="bf16", host_seconds=1.0, seconds=m * 1e-8)
               for m in (1024, 2048, 4096, 8192, 16384)]
    samples += [Sample(op="input", variant="jagged", phase="step", features={"samples": n, "events": n}, seconds=1e4) for n in (64, 128, 256, 512)]
    samples.append(Sample(op="constant:host", variant="update", phase="step", features={}, seconds=1.0))
    calibration = fit(Environment(device_name=device.name, device_kind="cuda"), samples, device=device)
    assert calibration.constants["host/update"] == 1.0
    eager, replayed = (predict(dataclasses.replace(row, execution=execution), [calibration]) for execution in ("eager", "cuda_graph"))
    assert replayed.seconds < 0.1 and 1.0 < eager.seconds < 1000.0
    kept = elsewhere(calibration, replayed=False)
    assert not kept.run_residuals and "host/update" in kept.constants and not any(c.op == "input" for c in kept.curves)


def test_bundled_tables_are_read_and_expressed():
    rows = [row for path in sorted(BUNDLED.glob("*.csv")) if not path.name.startswith("nccl_") for row in read(path)]
    assert {row.model for row in rows if row.kind == "step"} == {"llama3-8b", "dlrm-dcnv2"}
    assert all(row.source.startswith("https://") for row in rows)
    points, left = score([r for r in rows if r.kind == "step"], [])
    assert not left and len(points) == 18 and all(p.predicted.seconds > 0 for p in points)


def test_the_result_file(tmp_path):
    assert main([str(table(tmp_path, KERNEL, {**KERNEL, "id": "odd", "op": "conv"})), "--datasheet", "--out", str(tmp_path)]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "published.json").read_text())["rows"]}
    assert rows["not expressible: odd"]["value"] is None and "conv" in rows["not expressible: odd"]["note"]
    assert rows["kernel k"]["note"].endswith("https://example.org/k") and "kernel time: median |error|" in rows


def step(folder: Path, **changes: str):
    (row,) = read(table(folder, {**STEP, "layout": "fsdp=8", "precision": "bf16", "checkpoint": "*=none text.0=selective", **changes}))
    return row


@pytest.mark.parametrize("known", [[], calibrations()], ids=["datasheets", "calibrated"])
def test_what_is_fused_moves_fewer_bytes(tmp_path, known):
    """A model of root-mean-square norms: parts, norms of one kernel, one kernel a run. Defaults go with the execution."""
    predicted = {fusion: predict(step(tmp_path, fusion=fusion), known).seconds for fusion in ("none", "norms", "compiler", "epilogues")}
    assert predicted["none"] > predicted["norms"] > predicted["compiler"] >= predicted["epilogues"]
    assert predict(step(tmp_path), known).seconds == predicted["none"]
    for execution in ("compile", "cuda_graph"):
        row = step(tmp_path, execution=execution)
        assert plan_of(row, device_of(row)).system.fusion == "compiler"
    assert predict(step(tmp_path, execution="compile"), known).seconds == predicted["compiler"]


@pytest.mark.parametrize("known", [[], calibrations()], ids=["datasheets", "calibrated"])
def test_a_compiled_loss_keeps_no_logits_in_fp32(tmp_path, known):
    """12 bytes a logit at the start of backward, 4 where one kernel makes their gradient: 8,192 events of 128,256 words are 8.4 GB less. Blocks may
    be compiled without it: what takes more memory is the default."""
    eager, compiled = (predict(step(tmp_path, execution="compile", loss=loss), known) for loss in ("eager", "compiled"))
    assert compiled.seconds < eager.seconds and predict(step(tmp_path, execution="compile"), known).seconds == eager.seconds
    (row,) = read(table(tmp_path, {**STEP, "execution": "compile"}))
    assert row.local_batch is not None and row.sequence_length is not None
    assert eager.reserved - compiled.reserved >= 8 * row.local_batch * row.sequence_length * 128256
    assert predict(step(tmp_path), known).reserved == pytest.approx(eager.reserved)


@pytest.mark.parametrize("known", [[], calibrations()], ids=["datasheets", "calibrated"])
def test_whose_attention_and_what_runs_again(tmp_path, known):
    """FlashAttention-2 takes longer than cuDNN's on Hopper; every second product again costs more than none again and less than all of the block."""
    torch, cudnn = (predict(step(tmp_path, attention=name), known).seconds for name in ("torch", "cudnn"))
    assert torch > cudnn and predict(step(tmp_path), known).seconds == torch
    times = {policy: predict(step(tmp_path, checkpoint=f"*=none text.0={policy}"), known) for policy in ("none", "selective", "alternate", "full")}
    assert times["none"].seconds < times["selective"].seconds < times["alternate"].seconds < times["full"].seconds
    assert times["none"].reserved > times["selective"].reserved > times["alternate"].reserved > times["full"].reserved
    assert predict(step(tmp_path, optimizer="adamw_foreach"), known).seconds > torch


def test_overlap_hides_the_exchange_and_nothing_is_hidden_without(tmp_path):
    row = next(r for r in read(BUNDLED / "mlperf_dlrm_dcnv2.csv") if r.hosts == 2)
    beside, after = (predict(dataclasses.replace(row, overlap=name), calibrations()).seconds for name in ("embeddings", "none"))
    assert beside < after
    fused = predict(dataclasses.replace(row, table_update="fused"), calibrations()).seconds
    assert fused < beside and predict(dataclasses.replace(row, reduce="fp32"), calibrations()).seconds >= beside
    assert predict(dataclasses.replace(row, fusion="none"), calibrations()).seconds > beside


def test_bags_that_are_summed_in_hosts_cross_between_them_once(tmp_path):
    """Fewer bytes between hosts and a shorter step; on one host there is nothing to sum up first."""
    row = next(r for r in read(BUNDLED / "mlperf_dlrm_dcnv2.csv") if r.hosts == 16)
    by_rank = dataclasses.replace(row, exchange="pooled")

    def crossing(one) -> float:
        return sum(t.bytes for t in lower(plan_of(one, device_of(one)), None).graph.tasks if t.stream == "tier:rdma" and t.name == "embeddings")

    assert crossing(row) < 0.5 * crossing(by_rank)
    assert predict(row, calibrations()).seconds < predict(by_rank, calibrations()).seconds
    single = next(r for r in read(BUNDLED / "mlperf_dlrm_dcnv2.csv") if r.hosts == 1)
    assert predict(single, []).seconds == predict(dataclasses.replace(single, exchange="pooled_by_host"), []).seconds
    # what one GPU of a host holds of a table, the others do as well
    for place in plan_of(row, device_of(row)).tables:
        assert len(place.ranks) % 8 == 0 and {rank // 8 for rank in place.ranks} == {rank // 8 for rank in place.ranks[::8]}


def test_intervals_are_as_wide_as_what_is_carried_over(tmp_path):
    known = calibrations()
    for row, base in ((step(tmp_path), known), (step(tmp_path), []), (read(BUNDLED / "gemm.csv")[0], known)):
        found = predict(row, base)
        assert math.log(found.high / found.seconds) >= CARRIED_OVER - 1e-9 and found.seconds / found.low >= math.exp(CARRIED_OVER) - 1e-9


def test_no_product_of_a_step_is_faster_than_a_long_one(tmp_path):
    """Bursts of some milliseconds are; what is measured for a tenth of a second bounds both kernels and steps of others."""
    rows = read(table(tmp_path, {**KERNEL, "features": "m=65536 k=8192 n=8192"}))
    h200 = device_of(rows[0])
    samples = [Sample(op="linear", phase="forward", features={"m": m, "k": 8192, "n": 8192}, dtype="bf16",
                      seconds=2 * m * 8192**2 / (0.85 * h200.peak_flops["bf16"])) for m in (1024, 4096, 16384, 65536)]
    samples.append(Sample(op="constant:peak_flops", variant="bf16", phase="step", features={}, seconds=0.7 * h200.peak_flops["bf16"]))
    calibration = fit(Environment(device_name="H200-SXM", device_kind="cuda"), samples, device=h200)
    assert predict(rows[0], [calibration]).seconds == pytest.approx(2 * 65536 * 8192**2 / (0.7 * h200.peak_flops["bf16"]))
