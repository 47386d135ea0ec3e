// SPDX-License-Identifier: Apache-2.0
#include "device/cuda_api.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>
#include <mutex>
#include <vector>

#include "spillway/core/error.h"

namespace spillway {
namespace {

constexpr int kOldestGpu = 80;

cudaStream_t native(StreamRef stream) {
  return static_cast<cudaStream_t>(stream.native());
}

int numa_node_of(int ordinal) {
  std::array<char, 32> bus{};
  if (cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), ordinal) != cudaSuccess) {
    cudaGetLastError();  // else the next launch would report it
    return -1;
  }
  std::string name(bus.data());
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

// Of the driver's library, which is not linked: programs run without one. Null where the driver has none.
decltype(&cuDevicePrimaryCtxGetState) find_context_state() {
  void* found = nullptr;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 7000, cudaEnableDefault);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault);
#endif
  if (error == cudaSuccess) return reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(found);
  cudaGetLastError();  // else the next launch would report it
  return nullptr;
}

/// Whether this process has work or memory on a GPU, as far as can be found out: else to choose it would take some.
bool may_be_in_use(int ordinal) {
  static const auto state = find_context_state();
  unsigned flags = 0;
  int active = 0;
  return state == nullptr || state(ordinal, &flags, &active) != CUDA_SUCCESS || active != 0;
}

class Device final : public cuda::CudaDevice {
 public:
  explicit Device(int ordinal) : ordinal_(ordinal) {}
  ~Device() override {
    for (cudaStream_t stream : streams_) {
      cudaStreamSynchronize(stream);
      cudaStreamDestroy(stream);
    }
    cudaGetLastError();  // what failed here is nobody's later affair
  }

  void enter_thread() override { cuda::check_code(cudaSetDevice(ordinal_), "choosing a thread's device"); }

  StreamRef make_stream() override {
    const cuda::DeviceGuard guard(ordinal_);
    cudaStream_t stream = nullptr;
    cuda::check_code(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    const std::scoped_lock lock(mutex_);
    streams_.push_back(stream);
    return StreamRef(stream);
  }

  // Waiting threads sleep: the optimizer needs the cores.
  void* make_event() override {
    const cuda::DeviceGuard guard(ordinal_);
    cudaEvent_t event = nullptr;
    cuda::check_code(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
                     "making an event");
    return event;
  }
  void destroy_event(void* event) noexcept override {
    if (cudaEventDestroy(static_cast<cudaEvent_t>(event)) != cudaSuccess) cudaGetLastError();
  }

  void record(void* event, StreamRef stream) override {
    cuda::check_code(cudaEventRecord(static_cast<cudaEvent_t>(event), native(stream)), "recording an event");
  }
  void wait_event(void* event) override {
    cuda::check_code(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "waiting for the device");
  }
  bool passed(void* event) override {
    const cudaError_t state = cudaEventQuery(static_cast<cudaEvent_t>(event));
    if (state != cudaSuccess) cudaGetLastError();  // else the next launch would report it
    return state != cudaErrorNotReady;
  }
  void order_after(StreamRef stream, void* event) override {
    cuda::check_code(cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(event), 0),
                     "ordering a stream after an event");
  }

 private:
  const int ordinal_;
  std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace

std::string why_no_gpu(int ordinal) {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found != cudaSuccess) return fmt::format("CUDA finds none ({})", cudaGetErrorString(found));
  if (count == 0) return "CUDA finds none";
  if (ordinal < 0 || ordinal >= count) return fmt::format("this machine has GPUs 0 to {}", count - 1);
  cudaDeviceProp properties{};
  const cudaError_t read = cudaGetDeviceProperties(&properties, ordinal);
  if (read != cudaSuccess) return cudaGetErrorString(read);
  if (properties.major * 10 + properties.minor >= kOldestGpu) return {};
  return fmt::format("{} has compute capability {}.{}; expected {}.{} or newer", properties.name, properties.major,
                     properties.minor, kOldestGpu / 10, kOldestGpu % 10);
}

namespace cuda {

DeviceGuard::DeviceGuard(int ordinal) : ordinal_(ordinal) {
  check_code(cudaGetDevice(&before_), "asking for the current device");
  check_code(cudaSetDevice(ordinal), "choosing a device");
}

DeviceGuard::~DeviceGuard() {
  if (before_ == ordinal_ || may_be_in_use(before_)) cudaSetDevice(before_);
}

GpuInfo describe_gpu(int ordinal) {
  const DeviceGuard guard(ordinal);
  cudaDeviceProp properties{};
  check_code(cudaGetDeviceProperties(&properties, ordinal), "reading a GPU's properties");
  std::size_t free = 0, total = 0;
  check_code(cudaMemGetInfo(&free, &total), "asking for a GPU's free memory");
  return {properties.name,
          properties.major * 10 + properties.minor,
          {static_cast<std::int64_t>(total)},
          {static_cast<std::int64_t>(free)},
          numa_node_of(ordinal)};
}

std::shared_ptr<CudaDevice> make_cuda_device(int ordinal) {
  static_cast<void>(find_gpu(ordinal));
  return std::make_shared<Device>(ordinal);
}

StreamRef named_stream(void* stream) {
  return StreamRef(stream == nullptr ? static_cast<void*>(cudaStreamLegacy) : stream);
}

void copy(StreamRef stream, void* to, const void* from, Bytes bytes) {
  check_code(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes.value), cudaMemcpyDefault, native(stream)),
             "copying");
}

void zero(StreamRef stream, void* to, Bytes bytes) {
  check_code(cudaMemsetAsync(to, 0, static_cast<std::size_t>(bytes.value), native(stream)), "clearing");
}

void check_code(int code, const char* what) {
  if (code == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(code);
  cudaGetLastError();  // reported here: a later launch must not report it again
  throw DeviceError(
      fmt::format("CUDA failed at {}: {} ({}). The fault may lie in work given to the GPU before; "
                  "compute-sanitizer finds where",
                  what, cudaGetErrorString(error), cudaGetErrorName(error)));
}

}  // namespace cuda
}  // namespace spillway
