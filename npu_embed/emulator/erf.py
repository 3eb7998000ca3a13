"""Odd rational approximation of erf on [-CLAMP, CLAMP], float32 to a few units in the last place.

erf(z) = z N(z^2) / D(z^2), coefficients from the highest power on.

Source: Eigen's and XLA's erf for float32.
"""

from __future__ import annotations

import numpy as np

CLAMP = 4.0
NUMERATOR = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
DENOMINATOR = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)
RSQRT2 = float(np.float32(np.sqrt(0.5)))
