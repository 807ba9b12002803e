"""The output of the bench: a row as text with the state of the GPU, and a plot of all rows."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

TERA = 5000  # GFLOP/s from which speeds are shown in TFLOP/s
UNITS = {"clock_mhz": "MHz", "power_w": "W"}  # of the state of a GPU


def title(problem: dict[str, Any]) -> str:
  """Return a short description of a problem, from its record."""
  p = problem
  heads = f"H={p['Hq']}" + (f" HKV={p['Hkv']}" if p["Hkv"] != p["Hq"] else "")
  lengths = (f"M={p['M']} " if p["M"] != p["N"] else "") + f"N={p['N']}"
  sizes = f"D={p['Dk']}" + (f" DV={p['Dv']}" if p["Dv"] != p["Dk"] else "")
  return f"B={p['B']} {heads} {lengths} {sizes} {p['dtype']}{' causal' * p['is_causal']}"


def limit_name(by: str) -> str:
  """Return the name of a limit: a large read, or the matrix product of a library."""
  return "a read" if by == "read" else f"{by}'s product"


def speed_text(gflops: float) -> str:
  """Return a speed as text, in GFLOP/s or TFLOP/s."""
  return f"{gflops:.1f} GFLOP/s" if gflops < TERA else f"{gflops / 1e3:.1f} TFLOP/s"


def lines(row: dict[str, Any]) -> Iterator[str]:
  """Yield a row as lines of text."""
  divided = f", {row['devices']} devices by {row['shard']}" if row["shard"] else ""
  yield title(row["problem"]) + " backward" * row["backward"] + divided
  for name, c in row["contenders"].items():
    if not c["correct"]:
      yield f"  {name:<11} fails the gate: {'; '.join(c['failures'])}"
      continue
    shares = "".join(f"{share:4.0%} of {limit_name(by)}, " for by, share in c["share"].items())
    bytes_too = f"{c['gbytes']:5.1f} GB/s, " if "gbytes" in c else ""
    text = (
      f"  {name:<11} {c['median'] * 1e3:9.3f} ms (min {c['minimum'] * 1e3:.3f}, spread {c['spread']:.0%}) "
      f"{speed_text(c['gflops']):>15}, {bytes_too}{shares}error {c['error']:.2g}"
    )
    text += "".join(f", {c[key]:.0f} {unit}" for key, unit in UNITS.items() if key in c)
    if ratio := row["ratios"].get(name):
      text += f"; uopattn is {ratio['paired']:.2f} times as fast (by minima {ratio['of_minima']:.2f})"
    yield text
  if state := gpu_state([row]):
    yield f"  {'GPU':<11} {state}"


def gpu_state(rows: Sequence[dict[str, Any]]) -> str:
  """Return the clock and the power of the GPU while rows were timed: of one row, or the range over several.

  Each row counts with its medians. The result is "" if no row has them.
  """
  ranges = []
  for name, unit in UNITS.items():
    values = [row["gpu"][name]["median"] for row in rows if name in (row.get("gpu") or {})]
    if values:
      low, high = f"{min(values):.0f}", f"{max(values):.0f}"
      ranges.append(f"{low if low == high else f'{low} to {high}'} {unit}")
  return ", ".join(ranges)


def plot(rows: list[dict[str, Any]], path: str) -> None:
  """Draw the speed over N, one panel per D, for the most common dtype, without a mask, and with M = N.

  Of rows that differ only in the number of heads, the one with the fewest heads counts.
  """
  from matplotlib.figure import Figure

  points: dict[int, dict[str, dict[int, float]]] = {}
  dtype = Counter(row["problem"]["dtype"] for row in rows).most_common(1)[0][0] if rows else ""
  for row in sorted(rows, key=lambda row: row["problem"]["Hq"]):
    p = row["problem"]
    heads = {p["Hq"], p["Hkv"]}
    if p["dtype"] == dtype and not p["is_causal"] and len(heads) == 1 and (p["M"], p["Dk"]) == (p["N"], p["Dv"]):
      for name, c in row["contenders"].items():
        if c["correct"]:
          points.setdefault(p["Dk"], {}).setdefault(name, {}).setdefault(p["N"], c["gflops"])
  columns = min(4, max(1, len(points)))
  figure = Figure(figsize=(3.2 * columns, 2.8 * max(1, math.ceil(len(points) / columns))), layout="constrained")
  panels = figure.subplots(math.ceil(max(1, len(points)) / columns), columns, squeeze=False, sharex=True, sharey=True)
  fastest = max((y for by_name in points.values() for line in by_name.values() for y in line.values()), default=0)
  unit, divisor = ("TFLOP/s", 1e3) if fastest >= TERA else ("GFLOP/s", 1)
  names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
  legend: dict[str, Any] = {}
  for panel, (d, by_name) in zip(panels.flat, sorted(points.items()), strict=False):
    for i, name in enumerate(names):
      if name in by_name:
        n, y = zip(*sorted(by_name[name].items()), strict=True)
        (legend[name],) = panel.plot(n, [x / divisor for x in y], "o-", ms=4, color=f"C{i}")
    panel.set(title=f"D = {d}", xlabel="N", ylabel=unit, xscale="log")
    panel.grid(alpha=0.3)
  for panel in panels.flat[len(points) :]:
    panel.set_visible(False)
  panels.flat[0].set_ylim(bottom=0)  # shared by all panels, so set after all are drawn
  panels.flat[0].legend(list(legend.values()), list(legend))
  figure.savefig(path, dpi=120)
