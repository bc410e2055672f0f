from __future__ import annotations

import numpy as np
import pytest

from tiermem import kernels


@pytest.mark.parametrize("choice", ["native", "numba"])
def test_join_inverts_split(choice: kernels.Choice) -> None:
    loaded = kernels.load(choice)
    master = np.random.default_rng(0).standard_normal(4097).astype(np.float32)
    weight, residual = np.empty((2, master.size), np.uint16)
    joined = np.empty_like(master)
    loaded.split(master.ctypes.data, weight.ctypes.data, residual.ctypes.data, master.size, 1)
    loaded.join(weight.ctypes.data, residual.ctypes.data, joined.ctypes.data, master.size, 1)
    assert joined.tobytes() == master.tobytes()
