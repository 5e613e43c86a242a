"""A CUDA device made of the CPU: late, in any order that CUDA allows, and strict. For tests of what runs on CUDA.

Tensors on it say `cuda:0`, `torch.cuda.is_available()` is true, and code that runs there runs here unchanged:

- *Streams run late.* Work waits in its stream's queue until the device's `Mood` runs it, or somebody waits for it. Two
  streams have no order but by events. A mood says how soon which stream runs, and may hold one operation back.
- *Memory is PyTorch's caching allocator's* (memory.py): the same rounding, segments, splits and gaps, under the same
  cap, reused in the host's order. What is allocated and what is freed is poisoned, in the stream's order: NaN.
- *The host's memory* is reached late only where it is registered or pinned. Other copies wait, and are counted.
- *Errors stay*: a failed call of the driver is the thread's last error, which its next kernel raises.
- *Whoever waits is seen*: `Device.waits` has each time that the host waited, with the function of ours that did.

A PyTorch cannot have the device for one test only, so tests that need it run in a process of their own, which the test
session starts (tests/support/cuda/session.py) where a test or module is marked:

    pytestmark = pytest.mark.emulated

    def test_nothing_in_a_step_waits(device):      # the fixture: the Device, with a gentle mood and no waits so far
        device.queues.set_mood(Mood.drawn(3))
        ...
        assert device.waits == []

Tests marked `gpu` run on a real device where there is one, and here where there is none. Where there is no C++ compiler
(for guard.cpp), and with a PyTorch that has CUDA, marked tests are skipped, and say why. By hand, with --pdb and all:

    python -m tests.support.cuda tests/worker/runtime/test_cuda.py -x

Outside pytest: `build.load()` before torch is imported, then `torch_cuda.install()`, which gives the Device. For
questions of memory alone `device.dry = True` computes nothing, and `device.total_bytes` may be up to what the arena has
addresses for.
"""
