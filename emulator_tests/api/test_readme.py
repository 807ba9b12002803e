"""The READMEs: every block runs by itself, in a process of its own, and what they link to and name is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "kernels/README.md", "emulator_tests/README.md", "scripts/results/README.md"]
TEXT = {page: (ROOT / page).read_text() for page in PAGES}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*  # (\(.*\))$", re.MULTILINE)  # shapes that a line says it prints
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(
  r"`((?:uopattn|kernels|emulator_tests|scripts|runtime)/[\w./]*)[` ]"
)  # files and folders in the text
NOT_RUN = {  # commands of shell blocks, by how they start
  "scripts/test ": "the suite itself",
  "scripts/test_all ": "likewise",
  "DEV=CUDA ": "needs an NVIDIA GPU; test_gpu runs there",
  "apt-get ": "downloads a compiler, for the commands behind it; test_mockkfd runs them where it has what they need",
  "export ": "for the command behind it",
  "python -m uopattn.run ": "on tinygrad's emulator of AMD's instructions, as above",
  "git worktree ": "for the command behind it",
  "scripts/turns ": "with tiles of a kernel for NVIDIA's GPUs; test_turns runs it",
  "scripts/arm64 ": "downloads an emulated machine; .ci/run does",
  "scripts/test_arm64 ": "downloads an emulated machine; .ci/run does",
}


def blocks(language: str) -> dict[str, str]:
  """The blocks of a language, by page and number."""
  found = {}
  for page, text in TEXT.items():
    for i, (_, block) in enumerate(match for match in BLOCK.findall(text) if match[0] == language):
      found[f"{page}:{i}"] = block
  return found


def prose(page: str) -> str:
  return FENCED.sub("", TEXT[page])


def anchors(page: Path) -> set[str]:
  """The headings of a page, as GitHub writes them in links."""
  heads = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


PYTHON = blocks("python")
COMMANDS = [line for block in blocks("sh").values() for line in block.replace("\\\n", "").splitlines()]
RUN = list(dict.fromkeys(line for line in COMMANDS if not line.startswith(tuple(NOT_RUN))))


@pytest.mark.kinds(name=[x for x in PYTHON if x.startswith("README.md")])
@pytest.mark.parametrize("name", PYTHON)
def test_python(name: str, tmp_path: Path) -> None:
  block = PYTHON[name]
  done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  for shapes in PRINTED.findall(block):
    assert shapes in done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="scripts would set up .venv: run this by scripts/test")
@pytest.mark.parametrize("command", RUN)
def test_shell(command: str) -> None:
  environment = {key: value for key, value in os.environ.items() if key != "DEV"}
  done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith("flash attention is correct!\n")


def test_each_language_is_known_and_each_exception_is_met() -> None:
  assert {language for text in TEXT.values() for language, _ in BLOCK.findall(text)} == {"python", "sh"}
  assert len(PYTHON) >= 7
  assert len(RUN) >= 3
  assert [start for start in NOT_RUN if not any(line.startswith(start) for line in COMMANDS)] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
  links = [link for link in LINK.findall(prose(page)) if "://" not in link]
  assert links
  for link in links:
    file, _, anchor = link.partition("#")
    target = (ROOT / page).parent / file if file else ROOT / page
    assert target.exists(), link
    assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
  for name in NAMED.findall(prose(page)):
    base = ROOT / "uopattn" if name.startswith("runtime/") else ROOT
    assert (base / name).exists() or name.endswith("NAME.json"), name


def test_the_readme_is_short_and_its_tables_narrow() -> None:
  lines = TEXT["README.md"].splitlines()
  assert len(lines) <= 260
  assert max(line.count(" | ") + 1 for line in lines if line.startswith("|")) <= 6


@pytest.mark.parametrize("page", PAGES[1:])
def test_each_section_is_in_the_table_of_contents(page: str) -> None:
  listed = re.findall(r"^- \[(.*)\]\(#.*\)$", prose(page), re.MULTILINE)
  assert listed == re.findall(r"^## (.*)$", prose(page), re.MULTILINE)


def test_an_extra_is_always_that_of_a_checkout() -> None:
  for page in [*PAGES, "pyproject.toml", "uopattn/runtime/clang.py"]:
    assert re.search(r"pip install ['\"]?uopattn\[", (ROOT / page).read_text()) is None
