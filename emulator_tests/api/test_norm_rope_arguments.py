"""Bad arguments of norms and rotary positions: one error that names the argument, and nothing is written."""

import functools
from typing import Any

import pytest
from norm_rope import B, Case, Subject
from tinygrad import Tensor, dtypes

Zeros = functools.partial(Tensor.zeros, dtype=dtypes.half)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "an unknown name": (
    {"rotary": 1},
    TypeError,
    r"\(\) got an unexpected keyword argument 'rotary'; accepted are k_n",
  ),
  "no sin": ({"rotary_sin": None}, ValueError, "rotary_sin is missing; rotary_cos, rotary_sin and rotary_interleaved"),
  "no pairing": (
    {"rotary_interleaved": None},
    ValueError,
    "rotary_interleaved is missing; .* belong together: True for",
  ),
  "neither": (
    {"rotary_sin": None, "rotary_interleaved": None},
    ValueError,
    "^rotary_sin and rotary_interleaved are missing; ",
  ),
  "pairing": ({"rotary_interleaved": 1}, TypeError, "rotary_interleaved is 1; it must be a bool"),
  "angles of both elements": (
    {"rotary_cos": Zeros(30, 16)},
    ValueError,
    r"rotary_cos has shape \(30, 16\); .* 1 to 8 for",
  ),
  "axes": ({"rotary_cos": Zeros(1, 30, 8)}, ValueError, "rotary_cos has shape .* must be .positions, rotary_dim / 2"),
  "sin's shape": (
    {"rotary_sin": Zeros(30, 7)},
    ValueError,
    r"rotary_sin has shape \(30, 7\); it must be that of rotary_cos",
  ),
  "sin's dtype": (
    {"rotary_sin": Zeros(30, 8)},
    TypeError,
    "rotary_sin has dtype half; it must be that of rotary_cos, float",
  ),
  "cos's dtype": (
    {"rotary_cos": Zeros(30, 8, dtype=dtypes.int)},
    TypeError,
    "rotary_cos has dtype int; accepted are float",
  ),
  "cos's device": (
    {"rotary_cos": Zeros(30, 8, device="PYTHON")},
    ValueError,
    "rotary_cos is on PYTHON, the cache is on CPU",
  ),
  "too few positions": (
    {"rotary_cos": Zeros(21, 8), "rotary_sin": Zeros(21, 8)},
    ValueError,
    "start is 22 for sequence 0; for 2 rows with rotary_cos of 21 positions it must be from 0 to 19",
  ),
  "fewer positions than rows": (
    {"rotary_cos": Zeros(1, 8), "rotary_sin": Zeros(1, 8)},
    ValueError,
    "^there are 2 rows; with rotary_cos of 1 positions there must be at most 1$",
  ),
  "weight's shape": ({"k_norm_weight": Zeros(15)}, ValueError, r"k_norm_weight has shape \(15,\); it must be \(16,\)"),
  "weight": ({"q_norm_weight": 1.0}, TypeError, "q_norm_weight is 1.0; it must be a tinygrad Tensor"),
  "weight without q": ({"q": None}, ValueError, "q_norm_weight is given without q"),
  "eps": ({"norm_eps": -1.0}, ValueError, "norm_eps is -1.0; it must not be negative"),
  "eps beyond float32": ({"norm_eps": 1e39}, ValueError, r"norm_eps is 1e\+39; it must be finite in float32"),
  "too large eps": ({"norm_eps": 10**400}, ValueError, "norm_eps is inf; it must be finite in float32"),
  "no number": ({"norm_eps": "1"}, TypeError, "norm_eps is '1'; it must be a number"),
  "q's heads": (
    {"q": Zeros(B, 3, 2, 16)},
    ValueError,
    r"q has shape \(2, 3, 2, 16\); .* \(2, Hq, 2, 16\), Hq a multiple of 2",
  ),
  "q's rows": ({"q": Zeros(B, 4, 1, 16)}, ValueError, r"q has shape \(2, 4, 1, 16\); .* \(2, Hq, 2, 16\)"),
  "q's dtype": ({"q": Zeros(B, 4, 2, 16, dtype=dtypes.int)}, TypeError, "q has dtype int; accepted are float"),
}
ALONE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
  "q": ({"q": Zeros(B, 4, 2, 16)}, ValueError, "q is given without rotary_cos or q_norm_weight"),
  "eps": ({"norm_eps": 1e-5}, ValueError, "norm_eps is given without q_norm_weight or k_norm_weight"),
}


OF_PAGES = ("an unknown name", "cos's device", "too few positions")  # what the functions check or word themselves


@pytest.fixture(scope="module")
def subjects() -> dict[str, Subject]:
  """Nothing is written, so that one of each kind of memory serves all."""
  return {memory: Subject(Case(memory), "CPU") for memory in ("cache", "pages")}


def check_refused(subject: Subject, q: Tensor | None, options: dict[str, Any], error: type, message: str) -> None:
  right = subject.q, subject.options
  before = [x.uop for x, _ in subject.memory()]
  try:
    subject.q, subject.options = q, options
    with pytest.raises(error, match=message):
      subject.append()
  finally:
    subject.q, subject.options = right
  assert [x.uop for x, _ in subject.memory()] == before, "nothing is to be written"


@pytest.mark.parametrize(
  ("memory", "name"), [*(("cache", x) for x in BAD), *(("pages", x) for x in OF_PAGES)], ids=lambda x: x
)
def test_bad_arguments(name: str, memory: str, subjects: dict[str, Subject]) -> None:
  options, error, message = BAD[name]
  if memory == "pages":
    message = message.replace("the cache is", "k_pages is").replace(
      "2 rows with rotary_cos of 21 positions", "2 new keys"
    )
  options = subjects[memory].options | options
  check_refused(subjects[memory], options.pop("q", subjects[memory].q), options, error, message)


@pytest.mark.parametrize("name", ALONE)
def test_what_needs_others(name: str, subjects: dict[str, Subject]) -> None:
  options, error, message = ALONE[name]
  check_refused(subjects["cache"], options.get("q"), {k: x for k, x in options.items() if k != "q"}, error, message)


def test_keys_of_8_bits_are_not_rotated() -> None:
  subject = Subject(Case("pages", dtypes.fp8e4m3), "CPU")
  subject.k, subject.v = (Tensor.empty(*x.shape, dtype=dtypes.fp8e4m3) for x in (subject.k, subject.v))
  message = "k has dtype fp8e4m3; to be rotated or normalized it must have one of float"
  check_refused(subject, subject.q, subject.options, TypeError, message)
