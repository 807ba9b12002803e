# mypy: disable-error-code="empty-body, return"
"""Hopper's bulk copies (sm_90): between global and shared memory, by one lane, while its warp goes on.

A box of a tensor is copied by a tensor map, which has the tensor's shape and strides. Copies to shared memory count for
an mbarrier. Those to global memory are groups of one copy each, for which the lane that started them waits.
"""

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import UOp

from uopattn.dsl.instruction import Condition, Instruction, Statement, instruction, statement
from uopattn.dsl.instructions.dialect import Dialect, asm, ptx, shared


def _map(number: str) -> str:
  """The address of a tensor map, see `uopattn.runtime.cuda`, as an input of PTX."""
  return f'"l"(uopattn_map({number}))'


def _tensor_map() -> str:
  """CUDA text that builds a tensor map in shared memory and publishes it; see `BulkCopies.tensor_map`.

  Ranks, sizes, boxes and strides count from the innermost dimension on; the field of a rank is the rank minus 1.
  Element type 1 is unsigned 16-bit integers, swizzle mode 3 is 128 bytes, fill mode 0 is zeros.
  """
  fields = [("global_address", "64", "", "l", "({2})"), ("rank", "32", "", "r", "3")]
  fields += [("global_dim", "32", f"{i}, ", "r", f"({{{3 + i}}})") for i in range(4)]
  fields += [("box_dim", "32", f"{i}, ", "r", x) for i, x in enumerate(("64", "({10})", "1", "1"))]
  fields += [("element_stride", "32", f"{i}, ", "r", "1") for i in range(4)]
  fields += [("global_stride", "64", f"{i}, ", "l", f"(unsigned long long)({{{7 + i}}})") for i in range(3)]
  modes = [("elemtype", 1), ("interleave_layout", 0), ("swizzle_mode", 3), ("fill_mode", 0)]
  target = ".shared::cta.b1024.b"
  lines = [
    f'asm volatile("tensormap.replace.tile.{name}{target}{bits} [%0], {at}%1;"::"r"(s),"{kind}"({value}):"memory");'
    for name, bits, at, kind, value in fields
  ]
  lines += [
    f'asm volatile("tensormap.replace.tile.{name}{target}32 [%0], {x};"::"r"(s):"memory");' for name, x in modes
  ]
  lane = '[&](){{ unsigned y; asm volatile("mov.u32 %0, %%laneid;":"=r"(y)); return y; }}()'
  return asm(
    f"if ({{11}}) {{{{ unsigned s = (unsigned)__cvta_generic_to_shared({{0}}), lane = {lane};"
    ' asm volatile("st.shared.b32 [%0], %1;"::"r"(s + 4 * lane),"r"(0):"memory"); __syncwarp();'
    f" if (lane == 0) {{{{ {' '.join(lines)} }}}} __syncwarp();"
    ' asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1],'
    f' 128;"::{_map("{1}")},"r"(s):"memory"); }}}}'
  )


_COMMIT = 'asm volatile("cp.async.bulk.commit_group;":::"memory");'


def _reduce_add() -> str:
  """CUDA text that stores or adds, and commits; see `BulkCopies.tma_reduce_add`."""
  operands = f'"l"({{0}}),{shared("{1}")},"r"({{2}})'
  store, add = (
    f'asm volatile("{name} [%0], [%1], %2;"::{operands}:"memory");'
    for name in (
      "cp.async.bulk.global.shared::cta.bulk_group",
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32",
    )
  )
  return asm(f"if ({{4}}) {{{{ if ({{3}}) {store} else {add} {_COMMIT} }}}}")


def _tma_store() -> str:
  """CUDA text that stores a box and commits; see `BulkCopies.tma_store`."""
  operands = ",".join((_map("{1}"), shared("{2}"), *(f'"r"({{{i}}})' for i in range(3, 7))))
  name = "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group"
  text = f'asm volatile("{name} [%0, {{{{%2, %3, %4, %5}}}}], [%1];"::{operands}:"memory");'
  return asm(f"if ({{7}}) {{{{ {text} {_COMMIT} }}}}")


_TENSOR_MAP = Instruction("tensor_map", {"cuda": _tensor_map()}, cross_lane=True)
_TMA_LOAD = Instruction(
  "tma_load",
  {
    "cuda": ptx(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {{%3, %4, %5, %6}}], [%2], %7;",
      shared("{0}"),
      _map("{1}"),
      shared("{2}"),
      *(f'"r"({{{i}}})' for i in range(3, 7)),
      '"l"(({7}) ? 0x14F0000000000000ull : 0x12F0000000000000ull)',
    )
  },
)
_TMA_PREFETCH = Instruction(
  "tma_prefetch",
  {
    "cuda": ptx(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {{%1, %2, %3, %4}}];",
      _map("{0}"),
      *(f'"r"({{{i}}})' for i in range(1, 5)),
      when="{5}",
    )
  },
)
_TMA_STORE = Instruction("tma_store", {"cuda": _tma_store()}, writes=True)


class BulkCopies(Dialect):
  """Instructions of bulk copies."""

  def tensor_map(
    self,
    room: UOp,
    number: int,
    source: UOp,
    shape: tuple[int, UOp | int, int, int],
    strides: tuple[int, int, int],
    rows: int,
    when: UOp,
  ) -> UOp:
    """Build tensor map `number` of the workgroup, of 16-bit elements and the 128-byte swizzle, where `when`.

    A statement. The lanes of one warp build it together. A barrier of the workgroup and `tensor_map_acquire` must
    follow before another warp uses it. Source: PTX ISA, "tensormap.replace" and "tensormap.cp_fenceproxy".

    Args:
      room: 128 bytes of LDS, aligned to 128.
      source: the element at (0, 0, 0, 0) in global memory, aligned to 16 bytes.
      shape: columns, rows, heads and batches. What is beyond them is read as 0. Only rows may be known to the GPU
        alone.
      strides: elements from a row, a head and a batch to the next; multiples of 8.
      rows: rows of a box, up to 256; its columns are 64.
    """
    numbers = [(UOp.const(x) if isinstance(x, int) else x).cast(dtypes.int) for x in (number, *shape)]
    steps = [UOp.const(x * source.dtype.itemsize, dtypes.long) for x in strides]
    return statement(_TENSOR_MAP, self.name, (), room, numbers[0], source, *numbers[1:], *steps, rows, when)

  @instruction(
    cuda=ptx("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;", _map("{0}")),
  )
  def tensor_map_acquire(self, number: int, *after: UOp) -> Statement:
    """Make tensor map `number` known to this lane's `tma_load`. A statement."""

  def tma_load(
    self, to: UOp, number: int, barrier: UOp, start: tuple[UOp, UOp, UOp, UOp], keep: bool, *after: UOp
  ) -> UOp:
    """Start copying a box of tensor map `number` to LDS, swizzled; one lane copies all of it. A statement.

    Its bytes, those of zeros beyond the tensor included, count for the current phase of `barrier`.

    Args:
      to: LDS, aligned to 1024 bytes.
      start: first column, row, head and batch.
      keep: whether others will soon read the same, so that the L2 cache should keep it.
    """
    return statement(_TMA_LOAD, self.name, after, to, number, barrier, *(x.cast(dtypes.int) for x in start), keep)

  def tma_prefetch(self, number: int, start: tuple[UOp, UOp, UOp, UOp], when: UOp, *after: UOp) -> UOp:
    """Bring a box of tensor map `number` to the L2 cache, where `when`; one lane brings all of it. A statement.

    Source: PTX ISA, "cp.async.bulk.prefetch.tensor".

    Args:
      start: first column, row, head and batch.
    """
    return statement(_TMA_PREFETCH, self.name, after, number, *(x.cast(dtypes.int) for x in start), when)

  @instruction(
    cuda=ptx(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];",
      shared("{0}"),
      '"l"({1})',
      '"r"({2})',
      shared("{3}"),
    )
  )
  def bulk_load(self, to: UOp, source: UOp, count: int, barrier: UOp, *after: UOp) -> Statement:
    """Start copying `count` bytes from `source` in global memory to `to` in LDS, by one lane. A statement.

    They count for the current phase of `barrier`. Both addresses and `count` are multiples of 16. Source: PTX ISA,
    "cp.async.bulk".
    """

  @instruction(cuda=_reduce_add(), writes=True)
  def tma_reduce_add(
    self, to: UOp, source: UOp, count: int, first: Condition, when: Condition, *after: UOp
  ) -> Statement:
    """Start adding `count` bytes of float32 in LDS to those in global memory, or storing them where `first`.

    A statement. One lane, where `when`, does all of it. Both addresses and `count` are multiples of 16. Additions by
    several workgroups give the same bits in every run only if `semaphore_wait` orders them. Source: PTX ISA,
    "cp.reduce.async.bulk".
    """

  def tma_store(
    self, to: UOp, number: int, source: UOp, start: tuple[UOp, UOp, UOp, UOp], when: UOp, *after: UOp
  ) -> UOp:
    """Start storing a swizzled box from LDS by tensor map `number`; one lane, where `when`, stores all of it.

    A statement. What is beyond the tensor's end is not stored. `bulk_wait_read` must follow before the box changes, and
    before the workgroup ends. Source: PTX ISA, "cp.async.bulk.tensor".

    Args:
      to: the buffer in global memory (an INDEX) that the map describes.
      source: LDS, aligned to 1024 bytes.
      start: first column, row, head and batch, none of which may be negative: on an H200 that is an illegal
        instruction.
    """
    return statement(_TMA_STORE, self.name, after, to, number, source, *(x.cast(dtypes.int) for x in start), when)

  @instruction(cuda=ptx("cp.async.bulk.wait_group.read %0;", '"n"({0})', when="{1}"))
  def bulk_wait_read(self, pending: int, when: Condition, *after: UOp) -> Statement:
    """Wait, where `when`, until LDS is read for all that this lane has started to add or store, but the last `pending`.

    A statement.
    """

  @instruction(cuda=ptx("cp.async.bulk.wait_group 0;", when="{0}"))
  def bulk_wait(self, when: Condition, *after: UOp) -> Statement:
    """Wait, where `when`, until all that this lane has started to add or store is in memory. A statement."""


IN_FAMILIES = _TENSOR_MAP, _TMA_LOAD, _TMA_PREFETCH, _TMA_STORE  # of the methods with code
