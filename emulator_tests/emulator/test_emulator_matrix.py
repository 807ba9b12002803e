"""tinygrad's own tensor-core matrix product, for every instruction that each target's renderer offers."""

import re

import numpy as np
import pytest
from emulator_kernels import ARCHES, kernel, launch, threads
from helpers import placed
from simulated import of_type
from tinygrad import Context, Tensor, UOp, dtypes
from tinygrad.codegen.opt import tc
from tinygrad.device import Device
from tinygrad.uop.ops import Ops

import uopattn.emulator as emulator
from uopattn.emulator import wmma

FLOAT_ERROR = 2e-5  # float32 sums of 64 products of numbers near 1, against float64


def offered(arch):
  """The renderer's tensor cores, by index, that it has dtypes for."""
  with Context(DEV=f"EMU::{arch}"):
    renderer = Device["EMU"].renderer
  return [
    (i, core)
    for i, core in enumerate(renderer.tensor_cores)
    if {core.dtype_in, core.dtype_out} <= renderer.supported_dtypes()
  ]


def cases():
  """Each core on the first target that offers it, and one of each other target; all on all with --slow."""
  found, seen = [], set()
  for arch in ARCHES:
    new = [str(core) not in seen for _, core in offered(arch)]
    for n, (i, core) in enumerate(offered(arch)):
      quick = new[n] or (n == 0 and not any(new))
      found.append(pytest.param(arch, i, core, id=f"{arch}-{core}", marks=() if quick else pytest.mark.slow))
      seen.add(str(core))
  return found


CASES = cases()


def inputs(dtype, shape, seed):
  """Values of `dtype` as a tensor and as the float64 numbers they stand for."""
  rng = np.random.default_rng(seed)
  if dtype in dtypes.ints:
    x = rng.integers(-128, 128, shape)
    return Tensor(x.astype(np.int8), device="EMU"), x.astype(np.float64)
  x = rng.standard_normal(shape).astype(np.float32)
  if dtype in dtypes.fp8s:
    tensor = Tensor(x, device="EMU").cast(dtype).realize()
    return tensor, tensor.cast(dtypes.float).numpy().astype(np.float64)
  x = of_type(x, dtype)
  return placed(x, dtype, "EMU"), x.astype(np.float64)


@pytest.mark.parametrize(("arch", "index", "core"), CASES)
def test_matmul(arch, index, core):
  n, m, k = 32, 48, 128 if core.dims[2] == 128 else 64
  with Context(DEV=f"EMU::{arch}", TC_SELECT=index, TC_OPT=2, ALLOW_TF32=1), emulator.profile() as profile:
    a, a_exact = inputs(core.dtype_in, (m, k), 0)
    b, b_exact = inputs(core.dtype_in, (k, n), 1)
    got = a.matmul(b, dtype=core.dtype_out).cast(dtypes.float).numpy()
  products = [c.matrix for c in profile.kernels.values() if c.matrix]
  assert products == [m * n * k // np.prod(core.dims)]
  want = a_exact @ b_exact
  scale = np.abs(a_exact) @ np.abs(b_exact)  # what an error of one unit in every product would sum to
  unit = {dtypes.float: 2e-7, dtypes.half: 1e-3, dtypes.bfloat16: 8e-3, dtypes.int: 0}[core.dtype_out]
  if core.dtype_in == dtypes.float:
    unit = 2 * 2.0**-10  # tf32 drops 13 bits of each input
  assert (np.abs(got - want) <= unit * scale).all()


def test_every_offered_core_is_tried():
  tried = {(c.dims, c.dtype_in, c.dtype_out) for arch in ARCHES for _, c in offered(arch)}
  cores = tc.amd_rdna3 + tc.amd_rdna4 + tc.amd_cdna4 + tc.cuda_sm89
  assert {(c.dims, c.dtype_in, c.dtype_out) for c in cores} == tried


@pytest.mark.parametrize(
  ("arch", "core"),
  [
    (arch, core)
    for arch, cores in {
      "gfx1100": tc.amd_rdna3[:1],
      "gfx1201": tc.amd_rdna4[:1],
      "gfx950": tc.amd_cdna4,
      "sm_89": tc.cuda_sm89,
      "Apple9": tc.metal[:1],
    }.items()
    for core in cores
  ],
  ids=str,
)
def test_fragments_cover_each_matrix_once(arch, core):
  n, m, k = core.dims
  frags = wmma.fragments(arch, core.dims, core.dtype_in)
  assert (frags.lanes, frags.elements) == (core.threads, core.elements_per_thread)
  lane, e = np.divmod(np.arange(core.threads * core.elements_per_thread[2]), core.elements_per_thread[2])
  assert sorted(zip(*(x.tolist() for x in frags.c(lane, e)), strict=True)) == [
    (i, j) for i in range(m) for j in range(n)
  ]
  for layout, which, shape in ((frags.a, 0, (m, k)), (frags.b, 1, (k, n))):
    count = core.elements_per_thread[which]
    lane, e = np.divmod(np.arange(core.threads * count), count)
    elements = set(zip(*(x.tolist() for x in layout(lane, e)), strict=True))
    assert elements == {(i, j) for i in range(shape[0]) for j in range(shape[1])}
    assert core.threads * count == len(elements) * (2 if frags.repeated else 1)


def product(dims, dtype, vendor, lanes, elements):
  """A kernel of one matrix instruction, whose operands have so many elements per lane."""

  def body(o):
    t = threads(lanes)
    words = UOp.stack(*[t.cast(dtypes.uint) for _ in range(elements * dtype.itemsize // 4)])
    zero = UOp.const((0.0,) * (dims[0] * dims[1] // lanes), dtypes.float)
    result = UOp(Ops.WMMA, src=(words, words, zero), arg=(dims, dtype, vendor, lanes, None))
    return kernel("lacking", [o[t].store(result[0])], t)

  return body


@pytest.mark.parametrize(
  ("arch", "dims", "dtype", "elements"),
  [
    ("gfx1100", (16, 16, 16), dtypes.fp8e4m3, 8),
    ("gfx942", (16, 16, 128), dtypes.fp8e4m3, 32),
    ("gfx942", (16, 16, 32), dtypes.half, 8),
    ("gfx1201", (16, 16, 4), dtypes.float, 2),
    ("sm_75", (8, 16, 16), dtypes.half, 8),
    ("sm_75", (8, 16, 16), dtypes.bfloat16, 8),
    ("sm_75", (8, 16, 8), dtypes.float, 4),
    ("sm_80", (8, 16, 32), dtypes.fp8e4m3, 16),
    ("apple9", (16, 16, 16), dtypes.half, 8),
  ],
)
def test_products_that_a_target_lacks_are_named(arch, dims, dtype, elements):
  lanes = 64 if arch == "gfx942" else 32
  vendor = {"gfx": "AMD", "sm_": "CUDA", "app": "METAL"}[arch[:3]]
  with pytest.raises(
    emulator.UnknownInstruction, match=r"the target has no matrix instruction '\w+ " + re.escape(str(dims))
  ):
    launch(product(dims, dtype, vendor, lanes, elements), np.zeros(lanes, np.float32), arch=arch)


@pytest.mark.parametrize(("arch", "elements", "lanes"), [("gfx1201", 16, 32), ("gfx1100", 8, 32), ("gfx942", 8, 32)])
def test_fragments_of_another_target_are_named(arch, elements, lanes):
  message = rf"{arch} .* takes .* lanes, not \({elements}, {elements}, 8\) in each of {lanes}"
  with pytest.raises(emulator.UnknownInstruction, match=message):
    launch(product((16, 16, 16), dtypes.half, "AMD", lanes, elements), np.zeros(lanes, np.float32), arch=arch)


def test_tf32_ignores_low_bits():
  with Context(DEV="EMU::sm_80", TC_SELECT=5, TC_OPT=2, ALLOW_TF32=1):
    x = np.full((16, 8), 1 + 2.0**-11, np.float32)  # half a unit of tf32's last place: cut off, not rounded
    got = Tensor(x, device="EMU").matmul(Tensor(np.eye(8, dtype=np.float32), device="EMU")).numpy()
  np.testing.assert_array_equal(got, np.ones((16, 8)))


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx942"])
def test_agrees_with_tinygrads_own_emulator(arch):
  """On bfloat16, which tinygrad's PYTHON device can hold on every Python."""
  rng = np.random.default_rng(3)
  a, b = rng.standard_normal((2, 16, 32)).astype(np.float32)
  results = []
  for device in ("PYTHON", "EMU"):
    with Context(DEV=f"{device}::{arch}"):
      x, y = (Tensor(v, device=device).cast(dtypes.bfloat16).realize() for v in (a, b))
      results.append(x.matmul(y.T, dtype=dtypes.float).numpy())
  np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=FLOAT_ERROR)
