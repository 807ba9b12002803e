"""The bench and the table that the README takes from it. No test looks at a time."""

import functools
import itertools
import json
import re
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draw_speed
import numpy as np
import pytest
import readme_table
import speed

from uopattn import bench
from uopattn.bench import main
from uopattn.measure import contenders, gpu_state, limits, problem, sample, timing
from uopattn.measure.bench_report import lines
from uopattn.measure.problem import Config, Problem, prepare
from uopattn.measure.program import Usage
from uopattn.measure.timing import Runner, Timing
from uopattn.proof.gate import Gate

SMALL = Config(h=2, n=40, d=8, dtype="float")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
  for name in ("PAUSE", "SPIN", "WARM", "TURN"):
    monkeypatch.setattr(timing, name, 0)
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
    (["--against", "jax"], "--against jax: unknown; accepted are torch, tinygrad, fa3, fa4, fa4-deterministic"),
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
  monkeypatch.setattr(contenders, "load_torch", lambda backend, backward: backend)
  found = contenders.load(["torch"], backward)
  assert list(found) == ["uopattn", *(name if cpu else f"torch {name}" for name in names)]


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
    ("fa3", False, "fa3_fwd_interface", {}),
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


def test_contenders_take_turns() -> None:
  order: list[str] = []
  runners = {name: Runner(functools.partial(order.append, name), list) for name in "ab"}
  timing.alternate(runners, 2, timing.BURSTS)
  assert [name for name, _ in itertools.groupby(order)] == list("abab")


class Clock:
  """A clock that only calls of contenders advance."""

  def __init__(self) -> None:
    self.now, self.pauses, self.last, self.left = 0.0, 0, "", 0

  def perf_counter(self) -> float:
    return self.now

  def sleep(self, seconds: float) -> None:
    self.pauses += seconds == timing.PAUSE

  def runner(self, name: str, calls: int) -> Runner:
    """A contender of a second per call; in so many calls after another's turn it takes ..., 2, 1 seconds longer."""

    def call() -> None:
      self.left = self.left - 1 if self.last == name else calls
      self.last = name
      self.now += 1 + max(0, self.left)

    return Runner(call, list)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
  clock = Clock()
  for name, value in {"time": clock, "PAUSE": 0.5, "WARM": 0.5, "TURN": 0.5, "MOST_WARM": 100}.items():
    monkeypatch.setattr(timing, name, value)
  return clock


@pytest.mark.parametrize(
  ("burst", "most", "cpu", "found", "pauses"),
  [
    (False, 100, False, {"a": 1, "b": 1}, 0),
    (False, 7, False, {"a": 1, "b": 3}, 0),  # b would need 15 seconds
    (False, 100, True, {"a": 2, "b": 4}, 4),
    (True, 100, False, {"a": 2, "b": 4}, 4),
  ],
  ids=["sustained", "never settled", "on a CPU", "bursts"],
)
def test_times_count_once_all_have_settled(
  burst: bool,
  most: float,
  cpu: bool,
  found: dict[str, float],
  pauses: int,
  clock: Clock,
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  monkeypatch.setattr(timing, "MOST_WARM", most)
  monkeypatch.setattr(timing, "on_cpu", lambda: cpu)
  how = timing.BURSTS if burst else None
  times = timing.alternate({"a": clock.runner("a", 2), "b": clock.runner("b", 4)}, 2, how)
  assert {name: x.seconds for name, x in times.items()} == {name: [x, x] for name, x in found.items()}
  assert clock.pauses == pauses


SAMPLES = """2026/01/02 03:04:05.000, 1980, 400.5, 40
2026/01/02 03:04:05.100, 1500, 690.0, 50
2026/01/02 03:04:05.200, 1400, 700.0, 55
2026/01/02 03:04:05.300, [N/A], 710.0, [N/A]
2026/01/02 03:04:05.400, 7"""
SUMMARY = {
  "clock_mhz": {"lowest": 1400, "median": 1500, "highest": 1980},
  "power_w": {"lowest": 400.5, "median": 695, "highest": 710},
  "temperature_c": {"lowest": 40, "median": 50, "highest": 55},
}


def test_the_state_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  """From a program that prints samples until it is stopped."""
  program = tmp_path / "nvidia-smi"
  program.write_text(
    f"#!/bin/sh\necho \"$*\" >{tmp_path}/asked\nprintf '{SAMPLES}'\ntouch {tmp_path}/done\nexec sleep 60\n"
  )
  program.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
  with gpu_state.sampled([0, 1]) as state:
    while not (tmp_path / "done").exists():
      time.sleep(0.01)
  assert state.summary() == SUMMARY
  asked = (tmp_path / "asked").read_text()
  assert asked.startswith("--id=0,1 --query-gpu=timestamp,clocks.sm,power.draw.instant,temperature.gpu ")
  with gpu_state.sampled([]) as none:
    pass
  assert none.summary() == {}


def test_the_clock_and_power_of_a_contender_are_of_its_turns() -> None:
  epoch = datetime(2026, 1, 2, 3, 4, 5).timestamp() - 10  # so the samples are from second 10 on
  state = gpu_state.GPUState(gpu_state.samples(SAMPLES, epoch))
  assert [round(x.second, 3) for x in state] == [10, 10.1, 10.2, 10.3]
  assert state.means([(9.95, 10.05), (10.15, 10.25)]) == {"clock_mhz": 1690, "power_w": 550.25}
  assert state.means([(10.25, 10.35)]) == {"power_w": 710}
  assert state.means([(10.01, 10.02), (11, 12)]) == {}


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


def test_without_nvidia_smi_there_is_no_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
  monkeypatch.setenv("PATH", str(tmp_path))
  with gpu_state.sampled([0]) as state:
    pass
  assert state.summary() == {}
  assert state.means([(0, 1)]) == {}


def test_median_spread_and_ratios() -> None:
  ours, theirs = Timing([1.0, 2.0, 3.0, 4.0, 5.0]), Timing([2.0, 8.0, 6.0, 8.0, 5.0])
  assert ours.record(6 * 10**9) == {
    "seconds": ours.seconds,
    "median": 3.0,
    "minimum": 1.0,
    "spread": pytest.approx(2 / 3),
    "gflops": pytest.approx(2.0),
  }
  assert timing.ratios(ours, theirs) == {
    "of_medians": 2.0,
    "of_minima": 2.0,
    "paired": 2.0,
    "lowest": 1.0,
    "highest": 4.0,
  }


def test_a_share_is_of_the_limit_in_the_same_round() -> None:
  """Whose speed halves from one round to the next, as does ours."""
  ours, limit = Timing([1.0, 2.0, 4.0, 4.0]), Timing([0.5, 1.0, 2.0, 1.0])
  assert timing.share(ours, limit, 30, 20) == pytest.approx(0.75)


def test_the_limits_turn_follows_ours(monkeypatch: pytest.MonkeyPatch) -> None:
  order: list[str] = []

  def noted(runners: dict[str, Runner], rounds: int, how: timing.Turns | None) -> dict[str, Timing]:
    order.extend(runners)
    return {name: Timing([1.0]) for name in runners}

  monkeypatch.setattr(bench, "alternate", noted)
  bench.bench_row(SMALL, {"uopattn": contenders.uopattn, "again": contenders.uopattn}, rounds=1)
  assert [name.split()[0] for name in order] == ["uopattn", "limit", "again"]


def example() -> dict[str, Any]:
  """A record of two rows, the second of which is wrong."""
  problem = {"B": 1, "Hq": 8, "Hkv": 8, "M": 64, "N": 64, "Dk": 16, "Dv": 16, "dtype": "half", "is_causal": True}
  time = {"correct": True, "median": 2e-3, "spread": 0.034, "share": {"torch": 0.5, "numpy": 0.25}, "error": 1.23e-4}
  ours, theirs = time | {"gflops": 200.4}, time | {"gflops": 99.6}
  right = {
    "problem": problem,
    "contenders": {"uopattn": ours, "torch": theirs},
    "ratios": {"torch": {"paired": 2.012, "of_minima": 1.9}},
    "product_of": {"dtype": "float32", "size": 2048},
  }
  wrong = {
    "problem": problem | {"is_causal": False},
    "contenders": {"uopattn": {"correct": False, "error": 0.5}, "torch": theirs},
    "ratios": {},
  }
  return {
    "date": "2026-01-02",
    "machine": {"cpu": "Some CPU", "device": "CPU x", "threads": 2, "load": 0.52},
    "versions": {"torch": "2.0", "tinygrad": "0.14", "clang": "clang version 23"},
    "rounds": 7,
    "rows": [right, wrong],
  }


def test_table_from_a_record() -> None:
  assert readme_table.table(example()).splitlines() == [
    "| B H N D | dtype | GFLOP/s | spread | of torch's product | of numpy's product | error | torch: GFLOP/s | error "
    "| times as fast (by minima) |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    "| 1 8 64 16 | half, causal | 200 | 3% | 50% | 25% | 1.2e-04 | 100 | 1.2e-04 | 2.01 (1.90) |",
    "| 1 8 64 16 | half | fails the gate | | | | 5.0e-01 | 100 | 1.2e-04 | |",
  ]


def test_captions_say_how_it_was_timed() -> None:
  """Records from before there was a choice are in bursts."""
  record = example()
  assert "; 2026-01-02, in bursts, medians of 7 rounds" in readme_table.caption(record, "a.json")
  record |= {"mode": "sustained"}
  for row, clock in zip(record["rows"], (1400.0, 1755.0), strict=True):
    row["gpu"] = {"clock_mhz": {"median": clock}, "power_w": {"median": 690.4}}
  assert ", sustained (1400 to 1755 MHz, 690 W), medians of 7" in readme_table.caption(record, "a.json")


def test_rows_of_few_queries_show_their_share_of_a_read() -> None:
  record = example()
  record["rows"][0]["contenders"]["uopattn"] |= {"share": {"read": 0.914}, "gbytes": 44.6}
  head, _, row, _ = readme_table.table(record).splitlines()
  assert "| of a read |" in head
  assert "| 91% (45 GB/s) |" in row


@pytest.mark.parametrize("parts", [1, 3])
def test_a_read_reads_everything(parts: int) -> None:
  size = parts * 4 * limits.ITEMS * limits.VECTORS * limits.LANES
  assert limits.reader(size)().tolist() == [size / 4 / limits.ITEMS] * limits.ITEMS


def test_tables_of_records_have_captions_and_plots() -> None:
  text = readme_table.tables({"a.json": example(), "b.json": example()}, {"a.png", "other.png"})
  assert text.count(readme_table.table(example())) == 2
  assert "Some CPU, 2 threads, load average 0.5 at the start, clang version 23" in text
  assert "([b.json](b.json))" in text
  assert [line for line in text.splitlines() if "![" in line] == ["![Speed over N](a.png)"]


def case(kind: str) -> speed.Case:
  return speed.Case("a.json", "1 8 64 16", kind, "some case", "some machine")


def test_summary_compares_ours_with_the_best_other() -> None:
  record = example()
  row = record["rows"][0]
  row["contenders"] |= {
    "torch cudnn": row["contenders"]["torch"] | {"gflops": 150.0},
    "torch flex": row["contenders"]["torch"] | {"gflops": 500.0, "correct": False},
  }
  row["ratios"]["torch cudnn"] = {"paired": 1.336, "of_minima": 1.3}
  assert readme_table.summary({"a.json": record}, [case("half, causal")]).splitlines() == [
    "| case | uopattn | best other | ratio | machine |",
    "|---|--:|--:|--:|---|",
    "| some case | 200 GFLOP/s | 150 GFLOP/s, cuDNN | 1.34 | some machine |",
  ]


@pytest.mark.parametrize(("kind", "message"), [("float", "has no row"), ("half", "fails the gate")])
def test_summary_has_right_rows_only(kind: str, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    readme_table.summary({"a.json": example()}, [case(kind)])


def test_the_tables_of_the_pages_are_those_of_the_records(tmp_path: Path) -> None:
  pages = {"--summary": speed.ROOT / "README.md", "--page": speed.RESULTS / "README.md"}
  copies = {option: tmp_path / option for option in pages}
  for option, page in pages.items():
    old = re.sub(r"^\| .* H200 \|$|^\| 4 32 .*$", "old", page.read_text(), flags=re.MULTILINE)
    assert "\nold\n" in old
    copies[option].write_text(old)
  words = [str(word) for pair in copies.items() for word in pair]
  for _ in range(2):  # a second run changes nothing
    assert readme_table.main(words) == 0
    for option, page in pages.items():
      assert copies[option].read_text() == page.read_text()


def test_a_page_without_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / "README.md").write_text("nothing\n")
  assert readme_table.main(["--page", str(tmp_path / "README.md")]) == 2
  assert "has no lines" in capsys.readouterr().err


def test_the_picture_of_speed(tmp_path: Path) -> None:
  assert draw_speed.draw(tmp_path / "speed.png", speed.RESULTS) == 0
  assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
  row = speed.CASES[0].row(speed.read_records(speed.RESULTS))
  found = draw_speed.relative(row)
  assert found["torch flash"] == pytest.approx(1)
  assert found["uopattn"] == row["ratios"]["torch flash"]["paired"]


def test_bf16_of_torch_if_there_is_one() -> None:
  pytest.importorskip("torch")
  problem = prepare(Config(h=2, hkv=1, n=40, d=8, dtype="bfloat16", causal=1))
  runner = contenders.load_torch()(problem)
  assert runner is not None
  gate = Gate.of(problem.q, problem.k, problem.v, is_causal=True)
  assert gate.output(*runner.result()).correct


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
