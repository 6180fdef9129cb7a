from __future__ import annotations

import math

import numpy as np

from probe_service.loops import exponentials


def test_exponentials_against_the_library():
    values = np.concatenate([np.linspace(-86.9, 87.0, 200_001), [0.0, -87.5, -1e9, -math.inf]]).astype(
        np.float32
    )
    found = values.copy()
    exponentials(found, np.empty(len(values), dtype=np.int32))
    expected = np.exp(values[:-3].astype(np.float64))
    np.testing.assert_allclose(found[:-3], expected, rtol=3.5e-7)
    assert found[-4:].tolist() == [1.0, 0.0, 0.0, 0.0]
