"""The AMD kernels as AMD's compiler makes them: they fit the registers."""

import pytest
from compile_report import ARCHES, MATRIX, RESOURCES, TYPES, assemble, main_loop, resources, source, to_ir


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("arch", ARCHES)
def test_no_spills(arch: str, dtype: str, head_dim: int) -> None:
  text, tiles = source(arch, TYPES[dtype], 1, 1024, 1024, head_dim, causal=head_dim == 128)
  assembly = assemble(to_ir(text, arch), arch)
  used = resources(assembly)
  assert set(used) == set(RESOURCES)
  assert used["vgpr_spill_count"] == used["sgpr_spill_count"] == 0
  assert used["group_segment_fixed_size"] == tiles.lds_bytes(head_dim, head_dim)
  assert sum(count for name, count in main_loop(assembly).items() if MATRIX.match(name)) > 0
