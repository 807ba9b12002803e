"""Gradients of attention on GPUs without matrix units: multiply-adds, local memory and barriers alone.

FlashAttention-2's backward pass (Dao, 2023, algorithm 2) in two kernels without atomics: two runs give the same bits.
lse and delta = rowsum(O dO) - dlse are inputs. A workgroup keeps `block_rows` stationary rows, and loops over streamed
tiles of `block` rows:
    backward_q    keeps queries, streams keys:
      S = Q K^T, dP = dO V^T, P = exp(S - lse), dS = P (dP - delta)    dQ += dS K
    backward_kv   keeps keys, streams the queries of all query heads that share them:
      S^T = K Q^T, dP^T = V dO^T, P and dS as above                    dV += P^T dO, dK += dS^T Q
Each thread has `rows` stationary rows, and with `across - 1` others a share of the columns of S, dP and the sums
(`uopattn.dsl.gpu.thread_grid`).

Storage: S, dP and the sums are in registers. The stationary rows of both matrices, a streamed tile of each, and P and dS
as operands are in local memory, in float32.

Budget: `Tiles.registers` per thread and `Tiles.local_bytes`, of the 16 or 32 KiB that all GPUs have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import ceildiv, round_up

from uopattn.dsl import Scope, gated, sizes
from uopattn.dsl.gpu.backward_mainloop import Elements, Factor, Mainloop, QueryHeads, RowStats, ScoreRow, Sum
from uopattn.dsl.gpu.local_tile import LocalTile, RowTiles
from uopattn.dsl.gpu.thread_grid import ThreadGrid
from uopattn.dsl.gpu.workgroup import Workgroup
from uopattn.dsl.instructions import GENERIC, Dialect
from uopattn.dsl.rules.head_view import HeadView
from uopattn.dsl.rules.rules import Rules
from uopattn.dsl.schedule import DTYPES_16_32, Schedule, passes
from uopattn.kernels.generic_forward import GROUP
