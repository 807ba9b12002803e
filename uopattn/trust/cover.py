"""The probes of `python -m uopattn.check`: of a schedule each dtype, each feature and each shape, not all together."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tinygrad import dtypes
from tinygrad.dtype import DType

from uopattn.dsl.rules.bias import Bias, IndexedBy
from uopattn.dsl.rules.quantized import FORMATS, QUANTIZED_DTYPES
from uopattn.dsl.schedule import DTYPES_8, DTYPES_16, Problem, Schedule
from uopattn.plan.bias import QUERY_STEP, mask_bias
from uopattn.spec.tensors import dtype_name
from uopattn.trust.features import Sizes
from uopattn.trust.probe import Probe

# Sizes B, Hq, Hkv, M, N, Dk, Dv; those that a schedule does not serve are left out.
PREFILL: tuple[Sizes, ...] = (
  (2, 4, 2, 150, 208, 64, 64),
  (1, 2, 2, 304, 304, 128, 128),
  (1, 3, 3, 77, 131, 33, 17),
  (2, 6, 1, 200, 96, 80, 80),
  (1, 2, 1, 130, 272, 256, 256),
  (1, 1, 1, 70, 112, 320, 264),
)
SMALL = PREFILL[:4]  # those whose heads all kernels of biases have room for
SPLIT: Sizes = (1, 4, 2, 40, 1100, 64, 64)  # whose keys GPUs split
OF_SPLIT = Problem(*SPLIT, dtypes.float16, 1.0)
LONG = replace(OF_SPLIT, B=64, N=1 << 16)  # whose query heads some pack that do not pack those of `OF_SPLIT`
DECODE: tuple[Sizes, ...] = (
  (2, 8, 2, 1, 800, 64, 64),
  (1, 8, 1, 3, 1040, 128, 128),
  (2, 4, 4, 2, 77, 33, 17),
)
LATENT: tuple[Sizes, ...] = ((2, 32, 1, 1, 800, 576, 512), (1, 16, 1, 4, 304, 576, 512))
# Features that go together in one probe: each occurs once, and each kind of mask with another one.
COMBINED: tuple[tuple[str, ...], ...] = (
  ("is_causal",),
  ("window left+right", "softcap"),
  ("attn_mask bool --mn",),
  ("attn_mask float bhmn", "sinks"),
  ("is_causal", "q_start Tensor", "kv_lengths Tensor"),
  ("is_causal", "q_start Variable", "kv_lengths Variable", "heads_last qkv"),
  ("score_mod", "mask_mod"),
  ("block_mask",),
  ("dropout_p", "is_causal"),
  ("bounds",),
  ("kv_lengths Tensor", "page_table 16"),
  ("indices",),
  ("k_scale", "q_scale", "v_scale"),
)
OF_LATENT: tuple[tuple[str, ...], ...] = (("values_in_keys",), ("is_causal", "q_start Tensor", "values_in_keys"))

# Biases that a score_mod reads, by batch, head and index, with features that go together.
READ: tuple[tuple[Bias, tuple[str, ...]], ...] = (
  (Bias(False, True, IndexedBy.DISTANCES), ("is_causal",)),
  (Bias(False, True, IndexedBy.ALL), ("is_causal", "q_start Tensor", "kv_lengths Tensor")),
  (Bias(False, False, IndexedBy.PAIRS, count=QUERY_STEP), ("block_mask",)),
  (Bias(False, False, IndexedBy.DISTANCES), ("attn_mask bool --mn", "mask_mod")),
  (Bias(True, True, IndexedBy.QUERIES), ("dropout_p", "is_causal")),
  (Bias(True, False, IndexedBy.KEYS), ("window left+right", "softcap", "sinks")),
  (Bias(True, False, IndexedBy.ALL), ("is_causal", "q_start Variable", "kv_lengths Variable", "heads_last qkv")),
  (Bias(False, True, IndexedBy.KEYS), ("bounds",)),
  (Bias(False, True, IndexedBy.PAIRS), ("attn_mask float --mn",)),
)
# Additive masks, by their axes, likewise.
MASKS: tuple[tuple[str, tuple[str, ...]], ...] = (
  ("-hmn", ()),
  ("--mn", ("score_mod", "heads_last qkv")),
  ("-hm-", ("softcap", "mask_mod")),
  ("b--n", ("kv_lengths Tensor", "window left")),
  ("bhmn", ("is_causal", "sinks")),
  ("bh--", ("dropout_p",)),
)


def probes_of(schedule: Schedule, backward: bool, quick: bool = False) -> list[Probe]:
  """Return the probes of a schedule; some may turn out not to be served.

  Args:
    quick: one probe for each dtype and kind of shape.
  """
  made = _of_biases if schedule.of_bias else _probes
  return list(dict.fromkeys(x for dtype in schedule.dtypes for x in made(schedule, dtype, backward, quick)))


def _probes(schedule: Schedule, dtype: DType, backward: bool, quick: bool) -> Iterator[Probe]:
  shift = schedule.dtypes.index(dtype)

  def made(sizes: Sizes, features: tuple[str, ...], stored: DType = dtype) -> Probe:
    return _probe(schedule, backward, sizes, dtype, stored, features)

  shapes: Sequence[tuple[Sizes, ...]] = (PREFILL,) if backward else (PREFILL, DECODE)
  for sizes in shapes:
    for shape in sizes[:1] if quick else sizes if shift == 0 else sizes[shift % 2 :: 2]:
      yield made(shape, ())
    for i, features in enumerate(COMBINED[:1] if quick else COMBINED):
      if shift == 0 or i % 2 == shift % 2:  # the first dtype has all of them, each other one a half
        yield made(sizes[(i + shift) % len(sizes)], features)
  for features in () if backward or quick else ((), ("is_causal", "q_start Tensor", "kv_lengths Tensor")):
    probe = made(SPLIT, features)
    yield probe
    if (heads := schedule.pack_gqa(LONG)) != schedule.pack_gqa(OF_SPLIT):
      yield replace(probe, pack_gqa=heads)
  for shape, features in zip(LATENT, () if backward else OF_LATENT, strict=False):
    yield made(shape, features)
  if dtype not in DTYPES_8 and not backward:
    for stored in QUANTIZED_DTYPES[:1] if quick else QUANTIZED_DTYPES:
      yield made(DECODE[0], ("is_causal", "q_start Tensor", "scales"), stored)
      yield made(PREFILL[0], ("scales",), stored)
    for stored in () if quick else FORMATS.values():
      yield made(DECODE[0], ("is_causal", "q_start Tensor", "scales"), stored)
      yield made(PREFILL[0], ("kv_lengths Tensor", "page_table 16", "scales"), stored)
  if dtype == dtypes.float32:
    yield made(PREFILL[0], ("is_causal", "tf32"))
    for stored in () if quick or backward else DTYPES_16[:1]:
      yield made(DECODE[0], (), stored)


def _of_biases(schedule: Schedule, dtype: DType, backward: bool, quick: bool) -> Iterator[Probe]:
  shift = schedule.dtypes.index(dtype)

  def made(sizes: Sizes, features: tuple[str, ...], bias: Bias | None = None, stored: DType = dtype) -> Probe:
    probe = _probe(schedule, backward, sizes, dtype, stored, features)
    if bias is None:
      (axes,) = (x.split()[-1] for x in probe.features if x.startswith("attn_mask"))
      return replace(probe, bias=mask_bias([1 if x == "-" else 2 for x in axes]))
    return replace(probe, features=tuple(sorted({*probe.features, "score_mod"})), bias=replace(bias, read=(0, 0)))

  masks = [((f"attn_mask {dtype_name(dtype)} {axes}", *features), None) for axes, features in MASKS]
  biases = [*masks, *((features, bias) for bias, features in READ)]
  for i, (features, bias) in enumerate((masks[0], biases[len(masks)]) if quick else biases):
    if quick or shift == 0 or i % 2 == shift % 2:  # the first dtype has all of them, each other one a half
      yield made(SMALL[(i + shift) % len(SMALL)], features, bias)
  for shape in () if quick else PREFILL if shift == 0 else PREFILL[shift % 2 :: 2]:
    yield made(shape, (), READ[0][0])
  if dtype == dtypes.float32:
    yield made(PREFILL[0], ("is_causal", "tf32"), READ[0][0])
    for stored in () if quick else DTYPES_16[:1]:
      yield made(PREFILL[0], ("is_causal",), READ[1][0], stored)


def _probe(
  schedule: Schedule, backward: bool, sizes: Sizes, dtype: DType, stored: DType, features: tuple[str, ...]
) -> Probe:
  """Return a probe with sizes, and axes of a mask, as its features need them."""
  if "bounds" in features:  # sequences one after another are one batch
    sizes = (1, *sizes[1:])
  if any(x.startswith("page_table") for x in features):
    sizes = (*sizes[:4], sizes[4] // 16 * 16, *sizes[5:])
  own = tuple(sorted(_with_axes(x, sizes) for x in features))
  return Probe(schedule.name, backward, sizes, dtype_name(dtype), dtype_name(stored), own)


def _with_axes(feature: str, sizes: Sizes) -> str:
  """Return the feature; that of a mask without its axes of size 1."""
  if not feature.startswith("attn_mask"):
    return feature
  name, dtype, axes = feature.split()
  lengths = dict(zip("bhmn", (*sizes[:2], *sizes[3:5]), strict=True))
  return f"{name} {dtype} {''.join(x if lengths.get(x, 1) > 1 else '-' for x in axes)}"
