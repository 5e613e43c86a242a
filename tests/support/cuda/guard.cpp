// What a PyTorch without CUDA lacks for tensors on `cuda:0`: a guard of the device (one device, one stream as far as
// autograd knows), and hooks that say that there is one. And of CUDA's runtime what an allocator asks for, and a call of
// an allocator that somebody has brought as PyTorch calls it: from C++, where it may throw.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdio>
#include <exception>

namespace {
using namespace c10;
const Device CUDA_0(DeviceType::CUDA, 0);
const Stream DEFAULT(Stream::DEFAULT, CUDA_0);

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return CUDA_0; }
  Device getDevice() const override { return CUDA_0; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return DEFAULT; }
  Stream getDefaultStream(Device) const override { return DEFAULT; }
  Stream exchangeStream(Stream) const override { return DEFAULT; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
}  // namespace

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

extern "C" void put_device_there() {
  static const Guard* guard = new Guard();
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, guard);
}

namespace {
int (*malloc_of_device)(void**, size_t);
int (*free_of_device)(void*);
int (*synchronize_device)();
int (*last_error_of_device)();
}  // namespace

extern "C" {
void put_driver_there(int (*malloc)(void**, size_t), int (*free)(void*), int (*synchronize)(), int (*last_error)()) {
  malloc_of_device = malloc, free_of_device = free, synchronize_device = synchronize;
  last_error_of_device = last_error;
}
int cudaMalloc(void** pointer, size_t size) { return malloc_of_device(pointer, size); }
int cudaFree(void* pointer) { return free_of_device(pointer); }
int cudaDeviceSynchronize() { return synchronize_device(); }
int cudaGetLastError() { return last_error_of_device(); }

void* allocate_by(void* (*allocate)(ssize_t, int, void*), ssize_t size, void* stream, char* text, size_t room) {
  try {
    return allocate(size, 0, stream);
  } catch (const std::exception& error) {
    snprintf(text, room, "%s", error.what());
    return nullptr;
  }
}
}
