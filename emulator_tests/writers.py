"""A check of what kernels write on the emulator: no byte of global memory is stored by two workgroups of a kernel.

The emulator runs workgroups in order, so that the last one to write an element would be right every time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from uopattn.emulator.alu import storage
from uopattn.emulator.memory import Global


@contextmanager
def one_writer_each() -> Iterator[None]:
  """Fails if two workgroups store to the same byte; inside it each kernel runs once. Ordered additions do not count."""
  writers = dict[tuple[str, str], np.ndarray]()
  store = Global.store

  def checked(memory: Global, u: UOp, index: Any, dtype: DType, values: Sequence[Any]) -> None:
    run, size = memory.run, storage(dtype).itemsize
    lanes = run.active()
    written = memory.index_of(index, lanes)[:, None] * size + np.arange(len(values) * size)
    group = np.broadcast_to((run.first_group + run.group[lanes])[:, None], written.shape)
    store(memory, u, index, dtype, values)
    by = writers.setdefault((run.kernel, memory.name), np.full(memory.data.size, -1))
    others = (by[written] >= 0) & (by[written] != group)
    by[written] = group
    others |= by[written] != group  # in the same store
    places = np.unique(written[others])
    assert not len(places), f"{run.kernel}: two workgroups store to bytes {places[:4]} of {memory.name}"

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Global, "store", checked)
    yield
