"""The bench: what it runs, checks and records. No test looks at a time."""

import functools
import json
import re
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import on
from tinygrad import Context

from uopattn import bench
from uopattn.bench import main
from uopattn.measure import contenders, gpu_state, limits, problem, sample, timing
from uopattn.measure.bench_report import lines
from uopattn.measure.problem import Config, Problem, prepare
from uopattn.measure.program import Usage
from uopattn.measure.timing import Runner, Timing
from uopattn.plan.dispatch import backward_on
from uopattn.proof.gate import Gate

SMALL = Config(h=2, n=40, d=8, dtype="float")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
  for name in ("PAUSE", "SPIN", "WARM", "TURN"):
    monkeypatch.setattr(timing, name, 0)
  monkeypatch.setattr(limits, "SPIN", 0)
  monkeypatch.setattr(limits, "PRODUCT", 16)
  monkeypatch.setattr(limits, "READ", 1 << 18)


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(bench, "quick_rows", lambda kind: [SMALL])


def test_quick_run_writes_the_record_and_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  files = tmp_path / "b.json", tmp_path / "b.png"
  assert main(["cpu", "--quick", "--rounds", "2", "--json", str(files[0]), "--plot", str(files[1])]) == 0
  made = json.loads(files[0].read_text())
  assert {"cpu", "cores", "system", "device", "threads", "load"} <= set(made["machine"])
  assert {"python", "uopattn", "tinygrad", "numpy", "clang"} <= set(made["versions"])
  assert (made["rounds"], made["mode"]) == (2, "bursts")
  assert len(made["rows"]) == len(bench.quick_rows("CPU"))
  for row in made["rows"]:
    ours = row["contenders"]["uopattn"]
    assert len(ours["seconds"]) == 2
    assert ours["minimum"] <= ours["median"]
    assert ours["correct"] is True
    assert ours["error"] <= ours["errors"]["output"]["relative_bound"]
    assert ours["gflops"] == pytest.approx(row["flops"] / ours["median"] / 1e9)
    assert ours["share"].keys() == row["limits"].keys()
    assert row["ratios"] == {}
    if row["problem"]["M"] == 1:  # what counts is how fast K and V are read
      assert row["limits"].keys() == {"read"}
      assert ours["gbytes"] == pytest.approx(2 * 2 * 128 * 32 * 2 / ours["median"] / 1e9)
      rounds = zip(ours["seconds"], row["limits"]["read"]["seconds"], strict=True)
      speeds = [(2 * 2 * 128 * 32 * 2 / a, limits.READ / b) for a, b in rounds]
      assert ours["share"]["read"] == pytest.approx(sum(a / b for a, b in speeds) / 2)  # the median of two
    else:
      assert "gbytes" not in ours
  assert files[1].read_bytes().startswith(b"\x89PNG")
  printed = capsys.readouterr().out
  assert printed.count("GFLOP/s") == len(made["rows"])
  assert "B=1 H=4 HKV=2 M=1 N=128 D=32 bfloat16" in printed
  assert printed.count("of a read") == 1


@pytest.mark.usefixtures("one_row")
def test_gradients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main(["cpu", "--quick", "--backward", "--rounds", "2", "--json", f"{tmp_path}/b.json"]) == 0
  (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
  ours = row["contenders"]["uopattn"]
  assert row["backward"] is True
  (launch,) = backward_on(SMALL.spec("CPU"), "CPU")  # with AMX another one
  assert (row["kernel"], len(row["tiles"])) == (launch.schedule.name, 1)
  assert row["flops"] == 5 * 2 * 2 * 40 * 40 * 8  # products, heads, operations of a pair and column, sizes
  assert ours["errors"].keys() == {f"gradient of {x}" for x in "qkv"}
  assert ours["correct"] is True
  assert len(ours["seconds"]) == 2
  assert "B=1 H=2 N=40 D=8 float backward" in capsys.readouterr().out


@pytest.mark.usefixtures("one_row")
def test_wrong_gradients_get_no_speed(
  monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
  right = contenders.by_kernels

  def swapped(*given: Any) -> list[Any]:
    dq, dk, dv = right(*given)
    return [dq, dv, dk]

  monkeypatch.setattr(contenders, "by_kernels", swapped)
  assert main(["cpu", "--quick", "--backward", "--rounds", "1", "--json", f"{tmp_path}/b.json"]) == 1
  (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
  assert "seconds" not in row["contenders"]["uopattn"]
  assert "fails the gate: gradient of k" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_row")
def test_tinygrad_beside_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main(["--quick", "--against", "tinygrad", "--rounds", "3", "--json", f"{tmp_path}/b.json"]) == 0
  (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
  assert row["contenders"].keys() == {"uopattn", "tinygrad"}
  ratio = row["ratios"]["tinygrad"]
  assert ratio["lowest"] <= ratio["paired"] <= ratio["highest"]
  assert "uopattn is" in capsys.readouterr().out


def test_tinygrad_sits_large_problems_out() -> None:
  assert contenders.tinygrad(prepare(Config(h=8, n=257, d=8))) is None


@pytest.mark.usefixtures("one_row")
def test_a_wrong_kernel_gets_no_speed(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  monkeypatch.setattr(problem, "forward", lambda launch, q, k, v, o, lse: (o, lse))
  monkeypatch.setattr(timing, "TinyJit", lambda fxn: fxn)
  assert main(["--quick", "--against", "tinygrad", "--rounds", "1", "--json", f"{tmp_path}/b.json"]) == 1
  (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
  assert {"seconds", "median", "gflops"}.isdisjoint(row["contenders"]["uopattn"])
  assert row["ratios"] == {}
  line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  uopattn"))
  assert "fails the gate: output: " in line
  assert "640 elements NaN or infinite" in line
  assert "GFLOP/s" not in line


@pytest.mark.usefixtures("one_row")
def test_a_wrong_contender_is_shown_and_gets_no_speed(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
  def wrong(problem: Problem) -> Runner:
    out = (problem.q * 0).realize()
    return Runner(lambda: None, lambda: [contenders.numpy(out)])

  monkeypatch.setitem(contenders.LOADERS, "tinygrad", lambda backward: {"tinygrad": wrong})
  assert main(["--quick", "--against", "tinygrad", "--rounds", "1", "--json", f"{tmp_path}/b.json"]) == 0
  (row,) = json.loads((tmp_path / "b.json").read_text())["rows"]
  assert row["contenders"]["tinygrad"]["correct"] is False
  assert "seconds" not in row["contenders"]["tinygrad"]
  assert "seconds" in row["contenders"]["uopattn"]
  assert row["ratios"] == {}
  assert "tinygrad    fails the gate: output: " in capsys.readouterr().out


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (
      ["--against", "jax"],
      "--against jax: unknown; accepted are torch, torch-flash, torch-cudnn, torch-flex, tinygrad, fa3, fa4, "
      "fa4-deterministic",
    ),
    (["--backward", "--against", "tinygrad"], "--against tinygrad: has no backward pass"),
    (["--backward", "--against", "fa3"], "--against fa3: has no backward pass"),
    (["--against", "fa4-deterministic"], "--against fa4-deterministic: has no forward pass"),
    (["--against", "fa4"], "--against fa4: runs on CUDA only, not on CPU"),
    (["--rounds", "0"], "--rounds 0 is less than 1"),
    (["--json", "/nowhere/a.json"], "--json /nowhere/a.json: there is no such folder"),
  ],
)
def test_one_line_and_exit_status_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main(["--quick", *words]) == 2
  printed = capsys.readouterr()
  assert (printed.out, printed.err) == ("", f"uopattn.bench: {message}\n")


def missing(name: str) -> Any:
  raise ModuleNotFoundError(f"No module named {name!r}")


def test_a_contender_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(contenders, "importlib", SimpleNamespace(import_module=missing))
  assert main(["--quick", "--against", "torch"]) == 2
  message = "uopattn.bench: --against torch: it cannot be imported: No module named 'torch'\n"
  assert capsys.readouterr().err == message
  found = limits.limit(SMALL.spec())
  assert found is not None
  assert found.name == "numpy"


@pytest.mark.parametrize(
  ("cpu", "backward", "names"),
  [(True, True, ["torch"]), (False, False, ["flash", "cudnn", "flex"]), (False, True, ["flash", "cudnn"])],
)
def test_what_torch_stands_for(cpu: bool, backward: bool, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(contenders, "on_cpu", lambda: cpu)
  monkeypatch.setattr(contenders, "on_nvidia", lambda: not cpu)
  monkeypatch.setattr(contenders, "load_torch", lambda backend, backward: backend)
  found = contenders.load(["torch"], backward)
  assert list(found) == ["uopattn", *(name if cpu else f"torch {name}" for name in names)]
  if "flex" in names:
    assert list(contenders.load(["torch-flex"], backward)) == ["uopattn", "torch flex"]
  else:
    with pytest.raises(
      Usage, match=f"^--against torch-flex: is not available here; --against torch is {', '.join(list(found)[1:])}$"
    ):
      contenders.load(["torch-flex"], backward)


def test_on_other_gpus_torch_takes_no_part_and_there_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
  spec = SMALL.spec("CPU")
  for module in (contenders, timing):
    monkeypatch.setattr(module, "Device", SimpleNamespace(DEFAULT="METAL"))
  monkeypatch.setattr(contenders, "importlib", SimpleNamespace(import_module=lambda name: SimpleNamespace()))
  assert limits.limit(spec) is None
  with pytest.raises(Usage, match=r"^--against torch: runs on CPUs and on NVIDIA's GPUs only, not on METAL$"):
    contenders.load(["torch"])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
  """A device without a GPU, on which contenders may be loaded but not called."""
  monkeypatch.setattr(contenders, "Device", SimpleNamespace(DEFAULT="CUDA"))


@pytest.mark.usefixtures("cuda")
def test_flash_attention_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
  def only_torch(name: str) -> Any:
    return SimpleNamespace() if name == "torch" else missing(name)

  monkeypatch.setattr(contenders, "importlib", SimpleNamespace(import_module=only_torch))
  message = "^--against fa3: it cannot be imported: No module named 'fa3_fwd_interface'$"
  with pytest.raises(Usage, match=message):
    contenders.load(["fa3"])


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
  ("name", "backward", "module", "options"),
  [
    ("fa3", False, "fa3_fwd_interface", {"num_splits": 0}),
    ("fa4", False, "flash_attn.cute", {}),
    ("fa4", True, "flash_attn.cute", {}),
    ("fa4-deterministic", True, "flash_attn.cute", {"deterministic": True}),
  ],
)
@pytest.mark.parametrize("with_lse", [False, True])
def test_how_flash_attention_is_called(
  name: str, backward: bool, module: str, options: dict[str, Any], with_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
  calls: list[Any] = []

  def flash_attn_func(*tensors: str, **given: Any) -> Any:
    calls.append((tensors, given))
    return ("out", "lse") if with_lse else "out"

  modules = {"torch": SimpleNamespace(), module: SimpleNamespace(flash_attn_func=flash_attn_func)}
  monkeypatch.setattr(contenders, "importlib", SimpleNamespace(import_module=modules.__getitem__))
  monkeypatch.setattr(contenders, "_on_torch", lambda *given, **more: (*given, more))
  made: Any = contenders.load([name], backward)[name]
  found, attend_of, of_gradients, more = made
  assert (found, of_gradients, more) == (name, backward, {"heads_last": True})
  assert attend_of(Config(causal=1).spec())("q", "k", "v") == "out"
  assert calls == [(("q", "k", "v"), {"causal": True} | options)]


def test_versions_are_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(contenders, "installed_version", {"fa3-fwd": "3", "flash-attn-4": "4", "torch": "2"}.get)
  found = contenders.versions(["fa3", "fa4", "fa4-deterministic", "torch flash", "jax"])
  assert found == {"fa3-fwd": "3", "flash-attn-4": "4", "torch": "2", "jax": "unknown"}


class Array(np.ndarray[Any, Any]):
  """An array with those methods of torch's tensors that contenders use."""

  def to(self, device: str, dtype: Any) -> "Array":
    return self.astype(dtype).view(Array)

  def transpose(self, *axes: Any) -> "Array":
    return self.swapaxes(*axes).view(Array)

  def contiguous(self) -> "Array":
    return np.ascontiguousarray(self).view(Array)

  def float(self) -> "Array":
    return self.to("", np.float32)

  def cpu(self) -> "Array":
    return self

  def numpy(self) -> Any:
    return np.asarray(self)


def test_contenders_with_heads_last(monkeypatch: pytest.MonkeyPatch) -> None:
  torch = SimpleNamespace(float16=np.float16, bfloat16=None, float32=np.float32, inference_mode=nullcontext)
  torch.from_numpy = lambda x: x.view(Array)
  monkeypatch.setattr(contenders, "import_torch", lambda: torch)
  problem = prepare(Config(h=3, hkv=1, n=40, m=7, d=8, dtype="half"))

  def attend(q: Array, k: Array, v: Array) -> Array:
    assert (q.shape, k.shape, v.shape) == ((1, 7, 3, 8), (1, 40, 1, 8), (1, 40, 1, 8))
    assert all(x.flags.c_contiguous for x in (q, k, v))
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    weights = np.exp(problem.spec.scale * q @ k.transpose(2, 3))
    return (weights / weights.sum(-1, keepdims=True) @ v).view(Array).transpose(1, 2).to("cpu", np.float16)

  runner = contenders._on_torch("", lambda s: attend, backward=False, heads_last=True)(problem)
  assert runner is not None
  assert all(report.correct for report in sample.Sample.of(problem.spec).check(problem)(runner.result()))
  assert contenders._on_torch("", lambda s: attend, backward=False)(prepare(SMALL)) is None  # of float32


def test_all_problems_of_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(bench, "devices", lambda name: ["CUDA"])
  configs = [config for _, config in bench.problems(bench.arguments(["--dtype", "bfloat16"]))]
  assert {config.dtype for config in configs} == {"bfloat16"}
  assert len(configs) == len(set(configs)) == len(bench.gpu_rows()) - 1  # one of which is of bfloat16 in any case


@pytest.mark.parametrize(
  ("end", "status", "said"),
  [
    (KeyboardInterrupt(), 130, "\ninterrupted after 1 rows\n"),
    (MemoryError("no room"), 2, "uopattn.bench: MemoryError: no room\n"),
  ],
  ids=["interrupted", "failed"],
)
def test_the_rows_done_are_kept(
  end: BaseException,
  status: int,
  said: str,
  tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
  capsys: pytest.CaptureFixture[str],
) -> None:
  whole: Callable[..., dict[str, Any]] = bench.bench_row

  def once(config: Config, *rest: Any) -> dict[str, Any]:
    if config != SMALL:
      raise end
    return whole(config, *rest)

  monkeypatch.setattr(bench, "quick_rows", lambda kind: [SMALL, Config(h=3)])
  monkeypatch.setattr(bench, "bench_row", once)
  assert main(["--quick", "--rounds", "1", "--json", f"{tmp_path}/b.json"]) == status
  assert len(json.loads((tmp_path / "b.json").read_text())["rows"]) == 1
  printed = capsys.readouterr()
  assert printed.out.startswith("B=1 H=2 N=40 D=8 float\n  uopattn ")
  assert printed.err == said


def test_a_row_has_the_clock_and_power_of_each_contender(monkeypatch: pytest.MonkeyPatch) -> None:
  @contextmanager
  def sampled(gpus: Any) -> Any:
    state = gpu_state.GPUState()
    yield state
    state.append(gpu_state.Sample(0, {"clock_mhz": 1400.0, "power_w": 700.0}))

  monkeypatch.setattr(bench, "sampled", sampled)
  monkeypatch.setattr(gpu_state.GPUState, "means", lambda state, turns: state[0].values if list(turns) else {})
  row = bench.bench_row(SMALL, {"uopattn": contenders.uopattn, "again": contenders.uopattn}, rounds=1)
  assert {(c["clock_mhz"], c["power_w"]) for c in row["contenders"].values()} == {(1400, 700)}
  assert [", 1400 MHz, 700 W" in line for line in lines(row)] == [False, True, True, False]


def test_the_limits_turn_follows_ours(monkeypatch: pytest.MonkeyPatch) -> None:
  order: list[str] = []

  def noted(runners: dict[str, Runner], rounds: int, how: timing.Turns | None) -> dict[str, Timing]:
    order.extend(runners)
    return {name: Timing([1.0]) for name in runners}

  monkeypatch.setattr(bench, "alternate", noted)
  bench.bench_row(SMALL, {"uopattn": contenders.uopattn, "again": contenders.uopattn}, rounds=1)
  assert [name.split()[0] for name in order] == ["uopattn", "limit", "again"]


@pytest.mark.parametrize("reads", [1, 3])
def test_a_read_reads_everything(reads: int) -> None:
  size = reads * 4 * limits.ITEMS * limits.VECTORS * limits.LANES
  assert limits.reader(size)().tolist() == [size / 4 / limits.ITEMS] * limits.ITEMS


def test_bf16_of_torch_if_there_is_one() -> None:
  pytest.importorskip("torch")
  problem = prepare(Config(h=2, hkv=1, n=40, d=8, dtype="bfloat16", causal=1))
  runner = contenders.load_torch()(problem)
  assert runner is not None
  gate = Gate.of(problem.q, problem.k, problem.v, is_causal=True)
  assert gate.output(*runner.result()).correct


@pytest.mark.parametrize(("arch", "dtype", "wrong_by"), [("sm_80", "float", 2.0**-8), ("sm_90", "fp8e4m3", 2.0**-3)])
def test_a_sample_is_checked_by_how_kernels_multiply(arch: str, dtype: str, wrong_by: float) -> None:
  """float32 in tf32, and 8 bits whose products cut off terms."""
  with on(arch), Context(ALLOW_TF32=1):
    problem = prepare(Config(h=1, m=64, n=64, d=32, dtype=dtype))
    assert problem.products == {"tf32": dtype == "float", "cut": dtype != "float"}
    found = [contenders.numpy(x) for x in problem.computation()()]
    check = sample.Sample.of(problem.spec).check(problem)
  assert all(report.correct for report in check(found))
  assert not all(report.correct for report in check([found[0] * (1 + wrong_by), found[1]]))


def test_a_sample_of_gradients_is_checked_by_how_kernels_multiply() -> None:
  with on("sm_80"), Context(ALLOW_TF32=1):
    problem = prepare(Config(h=1, m=32, n=32, d=16, dtype="float"))
    found = contenders.uopattn_backward(problem).result()
    check = sample.Sample.of(problem.spec, backward=True).check_gradients(problem, None)
  assert all(report.correct for report in check(found))
  assert [report.correct for report in check([found[0] * (1 + 2.0**-7), *found[1:]])] == [False, True, True]


def test_gradients_that_a_kernel_does_not_write_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(timing, "TinyJit", functools.cache)  # which runs nothing again
  assert all(np.isnan(x).all() for x in contenders.uopattn_backward(prepare(SMALL)).result())


@pytest.mark.parametrize("causal", [0, 1])
def test_a_sample_of_queries_is_checked(causal: int, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sample.CHECKED, True, 5 * 40)
  problem = prepare(Config(h=2, n=40, d=8, dtype="float", causal=causal))
  assert sample.Sample.of(problem.spec).queries is None  # of a head that is not too long all are checked
  monkeypatch.setattr(sample, "MOST", 40 * 40 - 1)
  found = contenders.uopattn(problem).result()
  chosen = sample.Sample.of(problem.spec)
  assert (chosen.pairs, chosen.queries.tolist()) == ([(0, 0)], [0, 10, 20, 29, 39])  # type: ignore[union-attr]
  check = chosen.check(problem)
  assert all(report.correct for report in check(found))
  for row, right in ((11, True), (10, False)):
    out = found[0].copy()
    out[0, 0, row] *= 1.01
    assert check([out, found[1]])[0].correct == right


@pytest.mark.slow
def test_gradients_of_long_sequences_are_compared_with_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sample, "MOST", 1)
  config = Config(h=2, n=64, d=16, dtype="float", gpus=2, shard="sequence")
  row = bench.bench_row(config, contenders.load([], backward=True), 1, backward=True)
  assert (row["devices"], row["shard"], row["contenders"]["uopattn"]["correct"]) == (2, "sequence", True)
  assert "gradient of v, as of one device" in row["contenders"]["uopattn"]["errors"]
  problem = prepare(config)
  found = contenders.uopattn_backward(problem).result()
  wrong = [found[0], found[1], found[2] * 1.01]
  reports = sample.Sample.of(problem.spec, backward=True).check_gradients(problem, lambda: wrong)(found)
  assert [report.correct for report in reports] == [True, True, False]


def test_gpus_divide_problems_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(bench, "devices", lambda name: ["CUDA"])
  monkeypatch.setenv("GPUS", "2")
  configs = [config for _, config in bench.problems(bench.arguments([]))]
  assert {config.shard for config in configs} == {"batch", "heads", "sequence"}
  assert {config.gpus for config in configs} == {2}
  monkeypatch.setenv("SHARD", "heads")
  assert {config.shard for _, config in bench.problems(bench.arguments(["--backward"]))} == {"heads"}


def test_only_problems_with_some_values(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(bench, "devices", lambda _: ["CUDA"])

  def chosen(*words: str) -> list[Any]:
    return [config.settled for _, config in bench.problems(bench.arguments(words))]

  found = chosen("gpu", "--backward", "D=128", "CAUSAL=1")
  assert found
  assert {(x.d, x.dv, x.causal) for x in found} == {(128, 128, 1)}
  assert {x.dtype for x in chosen("DTYPE=float16")} == {"half"}
  assert {x.m for x in chosen("--few", "M=1")} == {1}
  assert len(chosen()) > len(chosen("HKV=32")) > len(chosen("N=4096", "HKV=32"))


@pytest.mark.parametrize(
  ("words", "message"),
  [
    (["gpu", "cpu"], "gpu cpu: accepted are one of cpu, gpu, all, and KEY=VALUE"),
    (["phone"], "phone: accepted are"),
    (["cpu", "D=100"], "D=100: none of the "),
    (["cpu", "SIZE=3"], "'SIZE=3' is not one of B="),
  ],
)
def test_words_that_are_not_understood(words: list[str], message: str) -> None:
  with pytest.raises(Usage, match=f"^{re.escape(message)}"):
    bench.problems(bench.arguments(words))
