"""A machine whose default device has no kernels, as a Mac has one: to be imported before tinygrad chooses the device.

tinygrad's device in Python, which needs no driver, stands for it.
"""

import tinygrad.device

tinygrad.device.ALL_DEVICES[:] = ["PYTHON", "CPU"]
