// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace spillway {

/// What stands behind the word "device".
enum class DeviceKind {
  emulated,        // ordinary memory with an enforced capacity; copies take a modelled link's time
  cuda,            // an NVIDIA GPU
  virtual_device,  // none: what a run would do is recorded
};
std::string_view to_string(DeviceKind kind);

/// A device stream that someone else owns: passed by value, never null on CUDA. The emulated device has one compute
/// order, that of the calling thread, and so no stream: its references are empty.
class StreamRef {
 public:
  StreamRef() = default;
  /// `native`: a cudaStream_t.
  explicit StreamRef(void* native) : native_(native) {}
  void* native() const { return native_; }
  bool operator==(const StreamRef&) const = default;

 private:
  void* native_ = nullptr;
};

}  // namespace spillway
