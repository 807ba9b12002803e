"""Tensors sharded over devices: as one device computes them, and by kernels of every device."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import check, on
from tinygrad import Context, Tensor, TinyJit, UOp, dtypes, function
from tinygrad.engine.realize import runtime_cache

import uopattn.plan.context_parallel as context_parallel
import uopattn.plan.sharded as sharded
from uopattn import BlockMask, KVCache, attention, attention_paged, attention_varlen
from uopattn.dsl.rules.masks import NO_ORIGIN
from uopattn.plan import bias
from uopattn.runtime.threads import ThreadedProgram

DEVICES = ("CPU", "CPU:1")
EMULATED = ("EMU", "EMU:1")
HEADS = (2, 4, 2, 40, 48)  # B, Hq, Hkv, M, N


def arrays(B: int, Hq: int, Hkv: int, M: int, N: int, D: int = 16, seed: int = 0) -> list[Any]:
  random = np.random.default_rng(seed)
  return [random.standard_normal(x).astype(np.float32) for x in ((B, Hq, M, D), (B, Hkv, N, D), (B, Hkv, N, D))]


def put(x: Any, axis: int | None, devices: tuple[str, ...] | None) -> Tensor:
  """An array on one device, or sharded along an axis; None puts all of it on every device."""
  return Tensor(x).realize() if devices is None else Tensor(x, device="PYTHON").shard(devices, axis).realize()


def computed(
  xs: list[Any], axes: Any, devices: tuple[str, ...] | None, gradients: bool, biases: bool = False, **options: Any
) -> list[Tensor]:
  """Output, LSE and gradients, of biases if they are asked for; arrays among the options are (array, axis)."""
  q, k, v = (put(x, axis, devices) for x, axis in zip(xs, axes, strict=True))
  given: dict[str, Any] = {
    n: put(x[0], x[1], devices) if isinstance(x, tuple) and n != "aux" else x for n, x in options.items()
  }
  if "aux" in options:
    given["aux"] = tuple(put(x, axis, devices) for x, axis in options["aux"])
  found: list[Tensor] = [*attention(q, k, v, return_lse=True, enable_gqa=True, **{"backend": "kernel"} | given)]
  if gradients:
    leaves = [q, k, v, *(x for name, x in given.items() if name == "sinks")]
    if biases:
      leaves += [x for x in (*given.get("aux", ()), given.get("attn_mask")) if x is not None and x.is_floating_point()]
    found += (found[0].square().sum() + found[1].sum()).gradient(*leaves)
  Tensor.realize(*found)
  return found


def same_bits(xs: list[Any], axes: Any, gradients: bool = True, **options: Any) -> None:
  """Fails unless two devices give the bits that one gives, sharded as q, or as k if q is not."""
  one = computed(xs, axes, None, gradients, **options)
  two = computed(xs, axes, DEVICES, gradients, **options)
  axis = next((x for x in axes if x is not None), None)
  assert [x.uop.axis for x in two[:2]] == [axis, axis]
  assert [x.uop.axis for x in two[2:5]] == list(axes[: len(two[2:5])])
  for i, (a, b) in enumerate(zip(one, two, strict=True)):
    np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=f"result {i}")


def close(xs: list[Any], axes: Any, devices: tuple[str, ...], **options: Any) -> None:
  """Fails unless the output and the LSE pass the gate, and gradients are those of one device but for rounding."""
  two = computed(xs, axes, devices, gradients=True, **options)
  assert [x.uop.axis for x in two[:5]] == [axes[0], axes[0], *axes]
  near(computed(xs, axes, None, gradients=True, **options), two, xs[0].dtype)


def near(one: list[Tensor], two: list[Tensor], dtype: Any) -> None:
  """Fails unless results are the same but for rounding."""
  for a, b in zip(one, two, strict=True):
    want, got = a.numpy().astype(np.float64), b.numpy().astype(np.float64)
    seen = np.isfinite(want)
    np.testing.assert_array_equal(seen, np.isfinite(got))
    assert np.abs(want[seen] - got[seen]).max() <= 16 * np.finfo(dtype).eps * np.abs(want[seen]).max()


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, 1, 1), (0, None, 0), (None, 1, 1), (None, None, None)])
def test_batches_and_heads(axes: tuple[int | None, ...]) -> None:
  same_bits(arrays(*HEADS), axes, is_causal=True)


def by_head(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
  return score + h * (i - j) * 0.1


def everything(axis: int) -> dict[str, Any]:
  """Options that go by the number of a batch or a head."""
  slopes = np.linspace(0.1, 0.5, 4, dtype=np.float32)
  mask = np.random.default_rng(1).standard_normal((2, 4, 40, 48)).astype(np.float32)
  return {
    "score_mod": lambda score, b, h, i, j, slopes: score + slopes[h] * (i - j) * 0.1 + b * 0.3,
    "mask_mod": lambda b, h, i, j, slopes: (i + j + b) % 5 != h,
    "aux": ((slopes, None),),
    "attn_mask": (mask, axis),
    "sinks": (slopes, 0 if axis == 1 else None),
    "kv_lengths": (np.array([48, 31], np.int32), None),
    "dropout_p": 0.2,
  }


@pytest.mark.kinds(axis=(1,))
@pytest.mark.parametrize("axis", [0, 1])
def test_mods_masks_and_dropout_go_by_the_numbers_of_the_whole(axis: int) -> None:
  with Context(TRAINING=1):
    found = []
    for devices in (None, DEVICES):
      Tensor.manual_seed(1)
      found.append(computed(arrays(*HEADS), (axis,) * 3, devices, gradients=True, **everything(axis)))
  for i, (a, b) in enumerate(zip(*found, strict=True)):
    if i == 5 and axis == 0:  # each device adds up the gradient of the sinks over its own batch
      np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)
    else:
      np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=f"result {i}")


def test_a_part_that_goes_by_its_own_numbers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sharded, "device_number", lambda count: UOp.const(0))
  with pytest.raises(AssertionError):
    same_bits(arrays(*HEADS), (1, 1, 1), False, score_mod=by_head)


def with_biases(axis: int | None) -> dict[str, Any]:
  """An additive mask, and a score_mod whose reads depend on what is divided: by head and distance, or by batch."""
  random = np.random.default_rng(2)

  def normal(*shape: int) -> Any:
    return random.standard_normal(shape).astype(np.float32)

  def of_heads(x: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any, small: Any, at: Any) -> Any:
    return x + slopes[h] * (j - i) * 0.1 + small[at[j - i + 39], h]

  def of_batches(x: Any, b: Any, h: Any, i: Any, j: Any, keys: Any, small: Any, at: Any) -> Any:
    return x * keys[b, j] + small[at[i], b]

  read = normal(2, 48) if axis == 0 else normal(4)
  aux = read, normal(8, 4), random.integers(0, 8, 87).astype(np.int32)
  mask = normal(*(1 if axis == 0 else 2, 4, 40, 48)), axis if axis == 1 else None
  mod = of_batches if axis == 0 else of_heads
  return {"attn_mask": mask, "score_mod": mod, "aux": tuple((x, None) for x in aux), "is_causal": True}


def by_distance() -> dict[str, Any]:
  """A bias per head and distance, for few heads."""
  table = np.random.default_rng(2).standard_normal((2, 87)).astype(np.float32)
  return {"score_mod": lambda x, b, h, i, j, table: x + table[h, j - i + 39], "aux": ((table, None),)}


@pytest.mark.usefixtures("no_plain_ops")
@pytest.mark.parametrize("axis", [1, 0, *(pytest.param(x, marks=pytest.mark.slow) for x in (2, None))])
def test_biases_by_kernels(axis: int | None) -> None:
  """Each device sums up the gradients of its batches, heads or queries, by their indices in the whole."""
  with Context(TRAINING=1):
    found = []
    for devices in (None, DEVICES):
      Tensor.manual_seed(1)
      options = with_biases(axis) | {"dropout_p": 0.2}
      found.append(computed(arrays(*HEADS), (axis,) * 3, devices, gradients=True, biases=True, **options))
  near(found[0], found[1], np.float32)
  assert [x.uop.axis for x in found[1][5:]] == [None, None, axis if axis == 1 else None]


@pytest.mark.usefixtures("no_plain_ops")
@pytest.mark.parametrize("axis", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_biases_by_blocks_of_queries(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(bias, "BLOCK_BYTES", 4 * 150 * 64)
  of = np.random.default_rng(0).integers(0, 8, (150, 150)).astype(np.int32)
  options = {
    "attn_mask": (np.ones((2, 1, 1, 1), np.float32), 0),
    "score_mod": lambda x, b, h, i, j, table, of: x + table[of[i, j], h],
    "aux": ((np.linspace(0, 1, 16, dtype=np.float32).reshape(8, 2), None), (of, None)),
  }
  found = [
    computed(arrays(2, 2, 2, 150, 150), (axis,) * 3, x, gradients=True, biases=True, **options) for x in (None, DEVICES)
  ]
  near(found[0], found[1], np.float32)


@pytest.mark.parametrize("what", ["numbers", "sum"])
def test_biases_at_the_places_of_a_part_are_noticed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
  right = bias.Read._firsts
  if what == "numbers":
    monkeypatch.setattr(bias.Read, "_firsts", lambda self, spec: right(self, replace(spec, origin=NO_ORIGIN)))
  else:
    right_gradient = sharded.gradient_of
    monkeypatch.setattr(sharded, "gradient_of", lambda x, shard, axis, summed: right_gradient(x, shard, axis, False))
  found = [
    computed(arrays(*HEADS), (1, 1, 1), x, gradients=True, biases=True, **with_biases(1)) for x in (None, DEVICES)
  ]
  with pytest.raises(AssertionError):
    near(found[0], found[1], np.float32)


@pytest.mark.each("axis")
@pytest.mark.parametrize("axis", [1, 0])
def test_a_block_mask_per_head(axis: int) -> None:
  shifts = put(np.array([0, 10, 20, 30], np.int32), 0, DEVICES)
  mask = BlockMask.of(lambda b, h, i, j, shifts: j <= i + shifts[h] + b, 2, 4, 40, 48, (shifts,), 16, 16)
  same_bits(arrays(*HEADS), (axis,) * 3, gradients=axis == 1, block_mask=mask)


@pytest.mark.kinds(axis=(1, None))
@pytest.mark.parametrize("axis", [0, 1, None])
def test_a_cache_under_tinyjit(axis: int | None) -> None:
  start, found = UOp.variable("start", 0, 99), []
  for devices in (None, DEVICES):
    own: dict[str, Any] = {} if devices is None else {"device": devices, "axis": axis}
    cache = KVCache(2, 2, 100, 16, dtype=dtypes.int8 if axis == 0 else dtypes.float32, **own)

    @TinyJit
    def step(q: Tensor, k: Tensor, v: Tensor, start: UOp, cache: KVCache = cache) -> Tensor:
      cache.append(k, v, start)
      return cache.attend(q, start, backend="kernel").realize()

    steps = [[put(x, axis, devices) for x in arrays(2, 4, 2, 1, 1, seed=i)] for i in range(4)]
    found.append([step(*x, start.bind(i)).numpy() for i, x in enumerate(steps)])
  np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("axes", [(1, 1), (0, None)])
def test_pages(axes: tuple[int | None, ...]) -> None:
  random, found = np.random.default_rng(0), []
  q, k, v = (random.standard_normal(x).astype(np.float32) for x in ((2, 4, 1, 16), (9, 2, 16, 16), (9, 2, 16, 16)))
  table, lengths = np.array([[7, 3, 5], [7, 2, 0]], np.int32), np.array([40, 25], np.int32)
  for devices in (None, DEVICES):
    given = (
      put(x, axis, devices) for x, axis in ((q, axes[0]), (k, axes[1]), (v, axes[1]), (table, None), (lengths, None))
    )
    found.append(attention_paged(*given, enable_gqa=True, backend="kernel").numpy())
  np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.kinds(axis=(0,))
@pytest.mark.parametrize("axis", [0, 1])
def test_varlen(axis: int) -> None:
  def mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + (b + h) * (i - j) * 0.1

  q, k, v = (x[0].transpose(1, 0, 2) for x in arrays(1, 4, 2, 60, 60))
  found: list[Any] = []
  for devices in (None, DEVICES):
    a, b, c = (put(np.ascontiguousarray(x), axis, devices) for x in (q, k, v))
    out = attention_varlen(
      a, b, c, [0, 25, 60], [0, 25, 60], is_causal=True, enable_gqa=True, backend="kernel", score_mod=mod
    )
    found.append(out.numpy())
  np.testing.assert_allclose(found[0], found[1], rtol=0, atol=0 if axis == 1 else 2e-6)


@pytest.mark.parametrize("axis", [1, None])
def test_packed_queries_over_pages(axis: int | None) -> None:
  """By heads, also with a mask of them, or whole on every device."""
  random, found = np.random.default_rng(0), []
  shapes = (24, 4, 16), (9, 2, 16, 16), (9, 2, 16, 16), (4, 24, 48)
  q, k, v, mask = (random.standard_normal(x).astype(np.float32) for x in shapes)
  ints = [np.array(x, np.int32) for x in ([0, 1, 20], [[7, 3, 5], [7, 2, 0]], [40, 25])]
  for devices in (None, DEVICES):
    a, b, c = (put(x, axis, devices) for x in (q, k, v))
    cu, table, lengths = (put(x, None, devices) for x in ints)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "attn_mask": put(mask, axis and 0, devices)}
    out, lse = attention_varlen(
      a, b, c, cu, None, page_table=table, kv_lengths=lengths, return_lse=True, backend="kernel", **options
    )
    found.append([out.numpy(), lse.numpy()])
    assert devices is None or out.uop.axis == axis
  for one, two in zip(*found, strict=True):
    np.testing.assert_array_equal(one, two)


def test_views_are_read_in_place_and_written_so(caplog: pytest.LogCaptureFixture) -> None:
  qkv, found = np.random.default_rng(0).standard_normal((2, 24, 3, 4, 16)).astype(np.float32), []
  for devices in (None, DEVICES):
    x = put(qkv, 3, devices)
    q, k, v = (x[:, :, i].transpose(1, 2) for i in range(3))
    out = attention(q, k, v, backend="kernel", is_causal=True)
    grad = out.square().sum().gradient(x)[0]
    Tensor.realize(out, grad)
    found.append([out.numpy(), grad.numpy()])
  for a, b in zip(*found, strict=True):
    np.testing.assert_array_equal(a, b)
  assert not caplog.records


@pytest.mark.parametrize("axis", [1, 2])
def test_in_a_function(axis: int) -> None:
  @function
  def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q * 2, k, v, backend="kernel", is_causal=True)

  xs = arrays(1, 2, 2, 32, 32)
  a, b, c = (put(x, axis, DEVICES) for x in xs)
  q, k, v = map(Tensor, xs)
  check((q * 2).realize(), k, v, attend(a, b, c).realize(), is_causal=True)


def test_variables_in_shapes() -> None:
  q, k, v = (put(x, 1, DEVICES) for x in arrays(2, 4, 2, 3, 64))
  n = UOp.variable("n", 3, 60).bind(20)
  out = attention(q, k[:, :, :n], v[:, :, :n], enable_gqa=True, backend="kernel")
  a, b, c = map(Tensor, arrays(2, 4, 2, 3, 64))
  check(a, b[:, :, :20].contiguous(), c[:, :, :20].contiguous(), out.realize())


def test_every_cpu_device_has_all_threads() -> None:
  same_bits(arrays(2, 2, 2, 33, 33), (0, 0, 0), gradients=False)
  of_devices = {device for (_, device), x in runtime_cache.items() if isinstance(x, ThreadedProgram)}
  assert of_devices >= set(DEVICES)


@pytest.mark.kinds(axes=((None, 2, 2), (2, 2, 2)), causal=(True,))
@pytest.mark.each("axes", "causal")
@pytest.mark.parametrize("axes", [(2, None, None), (None, 2, 2), (2, 2, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_sequences(axes: tuple[int | None, ...], causal: bool) -> None:
  close(arrays(1, 4, 2, 48, 48), axes, DEVICES, is_causal=causal)


@pytest.mark.slow
def test_sequences_on_four_devices() -> None:
  close(arrays(1, 2, 2, 48, 48), (2, 2, 2), tuple(f"CPU:{i}" if i else "CPU" for i in range(4)), is_causal=True)


@pytest.mark.slow
def test_mods_of_sequences_go_by_the_numbers_of_the_whole() -> None:
  mods = everything(0) | {"is_causal": True, "q_start": (np.array([8, 3], np.int32), None)}
  close(arrays(*HEADS), (2, 2, 2), DEVICES, **mods)


@pytest.mark.usefixtures("no_plain_ops")
@pytest.mark.parametrize("axes", [(2, 2, 2), pytest.param((2, None, None), marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(1, 4, 40, 40), pytest.param((2, 1, 1, 40), marks=pytest.mark.slow)])
def test_masks_of_sequences_by_kernels(shape: tuple[int, ...], axes: tuple[int | None, ...]) -> None:
  mask = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
  close(arrays(2, 4, 2, 40, 40), axes, DEVICES, biases=True, attn_mask=(mask, None), is_causal=True)


@pytest.mark.usefixtures("no_plain_ops")
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_biases_of_sequences_by_kernels(causal: bool) -> None:
  close(arrays(1, 2, 2, 40, 48), (2, 2, 2), DEVICES, biases=True, is_causal=causal, **by_distance())


@pytest.mark.kinds(block=(16,))
@pytest.mark.parametrize("block", [10, 16], ids=["as the parts", "across the parts"])
def test_a_block_mask_of_sequences(block: int) -> None:
  mask = BlockMask.of(lambda b, h, i, j: j <= i + h * 10, 1, 2, 40, 40, block_m=block, block_n=block)
  close(arrays(1, 2, 2, 40, 40), (2, 2, 2), DEVICES, block_mask=mask)


def test_ring_steps_in_the_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(
    context_parallel.ContextParallel,
    "_keys_of",
    lambda self, step, k, v: tuple(context_parallel.shard_of(x, 2).contiguous() for x in (k, v)),
  )
  with pytest.raises(AssertionError):
    close(arrays(1, 2, 2, 48, 48), (2, 2, 2), DEVICES, is_causal=True)


def test_positions_at_the_ends_of_int32() -> None:
  starts, lengths = np.array([2**31 - 1, 3], np.int32), np.array([48, -(2**31)], np.int32)
  options: dict[str, Any] = {"is_causal": True, "q_start": (starts, None), "kv_lengths": (lengths, None)}
  one, two = (computed(arrays(*HEADS), (2, 2, 2), x, gradients=False, **options) for x in (None, DEVICES))
  near(one, two, np.float32)


def test_decoding_over_keys_of_two_devices() -> None:
  xs = arrays(1, 4, 2, 1, 300)
  q, k, v = (put(x, axis, DEVICES) for x, axis in zip(xs, (None, 2, 2), strict=True))
  out, lse = attention(q, k, v, is_causal=True, q_start=200, enable_gqa=True, return_lse=True, backend="kernel")
  Tensor.realize(out, lse)
  assert out.uop.axis is None
  q, k, v = map(Tensor, xs)
  check(q, k, v, out, lse, is_causal=True, q_start=200)


@pytest.mark.kinds(arch=("sm_80",))
@pytest.mark.each("axis", "arch")
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_emulated_gpus(arch: str, axis: int) -> None:
  xs = [x.astype(np.float16) for x in arrays(1, 2, 2, 64, 64, 32)]
  with on(arch):
    close(xs, (axis,) * 3, EMULATED, is_causal=True)


@pytest.mark.usefixtures("no_plain_ops")
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_biases_on_emulated_gpus(arch: str) -> None:
  xs = [x.astype(np.float16) for x in arrays(1, 2, 2, 40, 48)]
  with on(arch):
    found = [computed(xs, (1, 1, 1), x, gradients=True, biases=True, **by_distance()) for x in (None, EMULATED)]
  near(found[0], found[1], np.float16)


@pytest.mark.parametrize(
  ("axes", "message"),
  [
    ((0, 1, 1), "q along its batches, k along its heads, v along its heads: these do not go together"),
    (
      (3, None, None),
      "q is sharded along its head size; accepted are batches, heads, sequence, or all on every device",
    ),
  ],
)
def test_what_makes_no_sense(axes: tuple[int | None, ...], message: str) -> None:
  q, k, v = (put(x, axis, DEVICES) for x, axis in zip(arrays(*HEADS), axes, strict=True))
  with pytest.raises(ValueError, match=message):
    attention(q, k, v, enable_gqa=True, backend="kernel")


def test_heads_that_cannot_be_divided() -> None:
  q, k, v = (put(x, axis, DEVICES) for x, axis in zip(arrays(1, 6, 3, 4, 4), (1, None, None), strict=True))
  with pytest.raises(ValueError, match="k must have 1 head or a multiple of 2, and has 3"):
    attention(q, k, v, enable_gqa=True, backend="kernel")


def test_plain_ops() -> None:
  q, k, v = (put(x, 1, DEVICES) for x in arrays(*HEADS))
  out, lse = attention(q, k, v, enable_gqa=True, score_mod=by_head, return_lse=True, backend="reference")
  Tensor.realize(out, lse)
  q, k, v = map(Tensor, arrays(*HEADS))
  check(q, k, v, out, lse, score_mod=by_head)


@pytest.mark.parametrize("axis", [0, 1])
def test_plain_ops_with_a_block_mask_per_head(axis: int) -> None:
  xs, mask = arrays(2, 2, 2, 24, 32), BlockMask.of(lambda b, h, i, j: j <= i + h * 10 + b, 2, 2, 24, 32)
  one = computed(xs, (axis,) * 3, None, gradients=True, block_mask=mask)
  two = computed(xs, (axis,) * 3, DEVICES, gradients=True, block_mask=mask, backend="reference")
  near(one, two, np.float32)


@pytest.mark.parametrize("axis", [2, None])
def test_gradients_of_plain_ops_where_keys_are_also_values(axis: int | None) -> None:
  """Of both there is one gradient. If every device has all queries, so does each compute all of q's."""
  (x, y, _), found = arrays(1, 2, 2, 24, 32), []
  for devices, backend in ((None, "kernel"), (DEVICES, "reference")):
    q, k = put(x, axis, devices), put(y, 2, devices)
    found.append(attention(q, k, k, backend=backend).square().sum().gradient(q, k))
    Tensor.realize(*found[-1])
  near(found[0], found[1], np.float32)


def test_gradients_of_queries_that_are_divided_over_a_cache_of_8_bits() -> None:
  (x, *new), found = arrays(1, 2, 2, 16, 16), []
  for devices in (None, DEVICES):
    cache = KVCache(1, 2, 32, 16, dtype=dtypes.int8, device=devices)
    k, v = (put(y, None, devices) for y in new)
    cache.append(k, v, 0)
    q = put(x, 2, devices)
    found.append([cache.attend(q, 0).square().sum().gradient(q)[0].realize()])
  near(found[0], found[1], np.float32)


@pytest.mark.parametrize("axis", [0, 2])
def test_plain_ops_give_what_has_no_influence_a_gradient_of_0(axis: int) -> None:
  q, k, v = (put(x, axis, DEVICES) for x in arrays(2, 2, 2, 8, 8))
  (grad,) = attention(q, k, v, return_lse=True, backend="reference")[1].sum().gradient(v)
  assert (grad.device, grad.uop.axis) == (DEVICES, axis)
  np.testing.assert_array_equal(grad.numpy(), np.zeros(v.shape))


@pytest.mark.parametrize("axes", [(0, 0), (1, 1), (2, None)], ids=["batches", "heads", "queries"])
def test_results_stay_where_kernels_write_them(axes: tuple[int | None, ...]) -> None:
  q, k, v = (put(x, axis, DEVICES) for x, axis in zip(arrays(2, 4, 2, 20, 20), (*axes, axes[1]), strict=True))
  out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, backend="kernel")
  assert len(out.schedule_linear(lse).src) == 1
