"""tanh to float32's last places, which 2·sigmoid(2x) − 1 is not near 0 (S. L. Moshier, Cephes, `tanhf`)."""

from __future__ import annotations

from pronghorn.kernels.launch import tl, triton


@triton.jit
def tanh(x):
    """Return tanh x in float32, of float32."""
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    small = p * z * x + x
    far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -far, far))
