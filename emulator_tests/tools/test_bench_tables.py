"""The tables and pictures that are made of the bench's records."""

import re
from pathlib import Path
from typing import Any

import draw_speed
import pytest
import readme_table
import speed


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
  best = max(row["contenders"].keys() - {"uopattn"}, key=lambda name: row["contenders"][name]["gflops"])
  assert max(found[name] for name in found if name != "uopattn") == found[best] == pytest.approx(1)
  assert found["uopattn"] == row["ratios"][best]["paired"]
