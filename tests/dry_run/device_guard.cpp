// A CUDA device with nothing behind it, for a torch built without CUDA: autograd, FakeTensor and
// `.to("cuda")` of fake tensors ask it which device and stream are current.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
    static Device device() { return {DeviceType::CUDA, 0}; }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    Device getDevice() const override { return device(); }
    Device exchangeDevice(Device) const override { return device(); }
    Stream getStream(Device given) const noexcept override {
        return Stream(Stream::DEFAULT, given);
    }
    Stream getDefaultStream(Device given) const override { return getStream(given); }
    Stream getNewStream(Device given, int) const override { return getStream(given); }
    Stream exchangeStream(Stream stream) const noexcept override { return stream; }
    void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

OneDevice the_device;
c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, &the_device);

}  // namespace

namespace at {

// torch looks for it by this name.
struct CUDAHooks : CUDAHooksInterface {
    explicit CUDAHooks(CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    DeviceIndex getCurrentDevice() const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
