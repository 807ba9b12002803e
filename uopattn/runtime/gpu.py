"""A GPU's model, its driver, its number of multiprocessors, and WebGPU's limits."""

import contextlib
import ctypes
import functools
import platform
from pathlib import Path

from uopattn.runtime.device import kind_of, opened


def gpu_name(device: str) -> str:
  """Return the model name of a GPU; "" for a device whose runtime does not report it."""
  kind, model = kind_of(device), ""
  if kind == "CUDA":
    from tinygrad.runtime.autogen import cuda

    name = ctypes.create_string_buffer(100)
    cuda.cuDeviceGetName(name, len(name), opened(device).cu_device)
    model = name.value.decode()
  elif kind == "CL":
    model = opened(device).device_name
  elif kind == "METAL":
    from tinygrad.runtime.ops_metal import from_ns_str

    model = from_ns_str(opened(device).sysdevice.name())
  elif kind == "AMD":
    model = _file(Path(getattr(opened(device).iface, "dev_sysfs_path", "/nowhere")) / "product_name")
  return model.strip()


def driver(device: str) -> str:
  """Return the name and the version of what drives a device: the driver, or the system that it is a part of."""
  kind = kind_of(device)
  if kind == "CL":
    return f"OpenCL {opened(device).driver_version}"
  if kind == "METAL":
    return f"macOS {platform.mac_ver()[0]}"
  if kind in ("CUDA", "NV") and (version := _file(Path("/sys/module/nvidia/version"))):
    return f"nvidia {version}"
  if kind == "CUDA":
    from tinygrad.runtime.autogen import cuda

    cuda.cuDriverGetVersion(number := ctypes.c_int32())
    return f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
  if kind == "AMD" and (version := _file(Path("/sys/module/amdgpu/version"))):
    return f"amdgpu {version}"
  return f"{platform.system()} {platform.release()}"


def _file(path: Path) -> str:
  """Return the content of a small file of the system; "" if it cannot be read."""
  with contextlib.suppress(OSError):
    return path.read_text().strip()
  return ""


@functools.cache
def multiprocessors(device: str) -> int:
  """Return the number of multiprocessors of a CUDA or NV device, or of compute units of a CL device.

  For NV it is the number of the whole chip. tinygrad does not ask which of them are disabled on this card.
  """
  gpu = opened(device)
  if kind_of(device) == "NV":
    return int(gpu.num_gpcs * gpu.num_tpc_per_gpc * gpu.num_sm_per_tpc)
  count = ctypes.c_int()
  if kind_of(device) == "CL":
    from tinygrad.runtime.autogen import opencl

    size = ctypes.sizeof(count)
    opencl.clGetDeviceInfo(gpu.cl_dev, opencl.CL_DEVICE_MAX_COMPUTE_UNITS, size, ctypes.byref(count), None)
    return count.value
  from tinygrad.runtime.autogen import cuda

  cuda.cuDeviceGetAttribute(count, cuda.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, gpu.cu_device)
  return count.value


@functools.cache
def webgpu_limits(device: str) -> tuple[int, int]:
  """Return how many buffers a kernel of a WEBGPU device may take, and the bytes of a workgroup's memory."""
  from tinygrad.runtime.autogen import webgpu

  webgpu.wgpuDeviceGetLimits(opened(device).device_res, limits := webgpu.WGPUSupportedLimits())
  return int(limits.limits.maxStorageBuffersPerShaderStage), int(limits.limits.maxComputeWorkgroupStorageSize)
