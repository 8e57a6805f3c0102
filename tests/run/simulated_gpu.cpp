// What autograd asks of a GPU: a device to make current, streams and events. There is one device, on which nothing waits.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct PlayedGuard : public DeviceGuardImplInterface {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, only()); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override { *event = (void*)1; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, PlayedGuard);
}

namespace at {
struct CUDAHooks : public CUDAHooksInterface {  // torch looks it up by this name
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}

namespace at::accelerator {  // loaded before torch's own, which know of no accelerator
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
bool isAccelerator(c10::DeviceType type) { return type == c10::DeviceType::CUDA; }
c10::DeviceIndex deviceCount() { return 1; }
}
