"""The launches of an attention on a device: the model's choice, or while tuning is on those measured to be fastest."""

from uopattn.plan.dispatch import dispatch, dispatch_backward
from uopattn.plan.launch import Launch
from uopattn.plan.target import target_of
from uopattn.spec.spec import AttentionSpec
from uopattn.tuning.switch import options


def launch_on(spec: AttentionSpec, device: str) -> Launch:
  """Return the launch for an attention on a tinygrad device such as "CPU" or "CUDA:1".

  Raises:
    NoKernel: no kernel serves it.
  """
  if (tuning := options()) is None:
    return dispatch(spec, target_of(device))
  from uopattn.tuning.choose import chosen  # which measures, by modules that few processes need

  return chosen(spec, device, tuning)[0]


def backward_on(spec: AttentionSpec, device: str) -> tuple[Launch, ...]:
  """Return the launches for the gradient of an attention on a tinygrad device.

  Raises:
    NoKernel: no kernels serve it.
  """
  if (tuning := options()) is None:
    return dispatch_backward(spec, target_of(device))
  from uopattn.tuning.choose import chosen

  return chosen(spec, device, tuning, backward=True)
